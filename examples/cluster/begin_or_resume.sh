#!/bin/sh
# begin_or_resume RUN RECIPE [flags of llamarl train]: goes on with RUN where it has begun, so that a job may be started again.
run=$1
shift
[ ! -e "$run/config.toml" ] || set -- --resume "$run"
exec llamarl train "$@" --run.dir "$run"
