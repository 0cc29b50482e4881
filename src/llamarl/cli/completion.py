"""``llamarl completion``: completion of verbs, flags and recipe keys for a shell."""

from __future__ import annotations

import argparse
import importlib
from typing import Any

from llamarl.errors import ConfigError

__all__ = ["add_parser", "run"]

_DESCRIPTION = """\
Prints a script that teaches your shell llamarl's verbs, flags, recipe names and every --section.key.

  llamarl completion bash > ~/.local/share/bash-completion/completions/llamarl
  llamarl completion zsh > ~/.zfunc/_llamarl          (with ~/.zfunc in fpath)
  llamarl completion tcsh > ~/.llamarl.tcsh           (source it in ~/.tcshrc)"""


def add_parser(verbs: Any, full: bool = True) -> None:
    parser = verbs.add_parser(
        "completion",
        help="print a completion script for your shell",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=("bash", "zsh", "tcsh"), help="which shell")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    try:
        import shtab
    except ImportError as error:
        raise ConfigError("shell completion needs shtab: pip install 'llamarl[completion]'") from error
    print(shtab.complete(_whole_parser(), shell=args.shell))
    return 0


def _whole_parser() -> argparse.ArgumentParser:
    """All verbs with all flags; a verb that takes overrides has every key of a recipe as a flag."""
    from llamarl.cli.main import VERBS
    from llamarl.config import known_keys
    from llamarl.shipped import shipped_recipes

    parser = argparse.ArgumentParser(prog="llamarl")
    verbs = parser.add_subparsers(dest="verb")
    for verb in VERBS:
        importlib.import_module(f"llamarl.cli.{verb.replace('-', '_')}").add_parser(verbs, full=False)
    import shtab

    for known in verbs.choices.values():
        if known.get_default("takes_overrides"):
            for key in known_keys():
                known.add_argument(f"--{key}", metavar="VALUE", help="a key of the recipe")
        for action in known._actions:
            if action.dest == "recipe" and not action.option_strings:
                action.choices = list(shipped_recipes())
            elif action.dest in ("recipe", "model", "input", "output", "out", "resume", "replay", "fork", "run_dir"):
                action.complete = shtab.FILE  # type: ignore[attr-defined]
    return parser
