#!/bin/sh
# begin_or_resume RUN RECIPE [flags of llamarl train]: goes on with RUN where it has begun, so that a job may be started again.
# RECIPE names its code once more: a new pod has another home, without the key that marks RUN as yours. So leave RECIPE as it is.
# With LLAMARL_MIRROR=s3://bucket/runs/x in the environment RUN is copied there, and comes back from there to an empty machine.
run=${1:?begin_or_resume RUN RECIPE} recipe=${2:?begin_or_resume RUN RECIPE}
shift 2
[ -z "$LLAMARL_MIRROR" ] || set -- "$@" --run.mirror "$LLAMARL_MIRROR"
if [ -e "$run/config.toml" ]; then exec llamarl train "$recipe" --resume "$run" "$@"; fi
set -- --run.dir "$run" "$@"
if [ -n "$LLAMARL_MIRROR" ] && llamarl train --resume "$LLAMARL_MIRROR" "$@" --dry-run; then exec llamarl train "$recipe" --resume "$LLAMARL_MIRROR" "$@"; fi
exec llamarl train "$recipe" "$@"
