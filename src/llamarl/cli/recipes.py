"""``llamarl recipes``: the recipes that ship with llamarl."""

from __future__ import annotations

import argparse

from llamarl.reading import find_recipe, shipped_recipes

__all__ = ["add_arguments", "run"]

_DESCRIPTION = """\
Complete jobs to start from. A name stands for the file wherever a recipe is asked for.

  llamarl recipes                      list them
  llamarl recipes tiny > mine.toml     a copy to change
  llamarl train tiny                   run one"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = _DESCRIPTION
    parser.add_argument("name", nargs="?", help="print this one instead")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.name:
        print(find_recipe(args.name).read_text(encoding="utf-8"), end="")
        return 0
    recipes = shipped_recipes()
    width = max(map(len, recipes))
    for name, purpose in recipes.items():
        print(f"{name:<{width}}  {purpose}")
    return 0
