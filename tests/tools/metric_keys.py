"""Writes docs/metric_keys.md from the table of keys: ``python tests/tools/metric_keys.py``."""

import textwrap
import tomllib
from importlib import resources
from pathlib import Path

from llamarl.observability.keys import is_timing_key

PAGE = Path(__file__).parents[2] / "docs" / "metric_keys.md"

_HEAD = """# The keys of metrics.jsonl

ROLES

| key | unit | meaning | over ranks | same in every run |
|---|---|---|---|---|
"""

_ROLES = """`ROLE` stands for each of {}, where the job has it; NAME, LABEL and KEY for what the task brings, \
N for a number. What a row is and how times are measured: [metrics](metrics.md)."""

_TAIL = """
## Over ranks

An executor may run on several ranks: generator replicas, trainer shards. Its metrics are those of
all of them; the column *over ranks* says how their values become one.

| over ranks | value of the executor |
|---|---|
| `sum`, `max`, `min` | of the ranks that report the key |
| `mean by KEY` | mean, each rank weighted by its own value of `KEY` |
| `mean` | mean, each rank counted once |
| `same` | one value that stands for all ranks; two that differ end the run with an error |

What only one rank reports is taken to the bit. Of tensor-parallel peers, which hold the same
samples, one reports; the trainer's and the critic's own numbers are over all their ranks before
they are reported. `time/x_s` runs from the start of the first rank to the end of the last one, and
the trace shows the spans of rank 0.

A key that the table does not know, of an executor of your own, goes by its name:

| name | over ranks |
|---|---|
| `time/...` | max |
| ends in `max` or `min` (`judge/score_max`) | max or min |
| `tokens/...`, `samples/...`, `groups/...`, or a part that begins with `num_` (`judge/num_calls`) | sum |
| anything else | mean over the ranks that report it |

For another rule, reduce in the executor and report from one rank.
"""


def page() -> str:
    """The whole page."""
    text = (resources.files("llamarl.observability") / "keys.toml").read_text(encoding="utf-8")
    table, rows = tomllib.loads(text), []
    for name, key in table["keys"].items():
        ranks = key.get("ranks", "same") + (f" by `{key['weight']}`" if "weight" in key else "")
        repeats = "no" if is_timing_key(name) else "yes"
        rows.append(f"| `{name}` | {key['unit']} | {key['meaning']} | {ranks} | {repeats} |\n")
    roles = textwrap.fill(_ROLES.format(", ".join(table["roles"])), 100)
    return _HEAD.replace("ROLES", roles) + "".join(rows) + _TAIL


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
