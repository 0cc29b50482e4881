#!/bin/sh
# begin_or_resume RUN RECIPE [flags of llamarl train]: goes on with RUN where it has begun, so that a job may be started again.
run=$1 recipe=$2
shift 2
if [ -e "$run/config.toml" ]; then exec llamarl train --resume "$run" "$@"; fi
exec llamarl train "$recipe" "$@" --run.dir "$run"
