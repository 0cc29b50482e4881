"""Questions with a calculator: the policy may have expressions worked out, and its final answer is judged as mathematics.

The calculator knows numbers, ``+ - * / // % **`` and parentheses, exactly (in fractions), of bounded sizes. Everything else, and
whatever would be too large, is an error that the policy sees. Nothing is ever executed: the expression's tree is walked.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from llamarl.data.items import TaskItem
from llamarl.environments.episode import Observation, Step
from llamarl.environments.games.game import checked
from llamarl.environments.math import judge_answer
from llamarl.environments.tools import Tool, ToolEnvironment, ToolError

__all__ = ["Calculator", "work_out"]

MAX_CHARS = 300
MAX_BITS = 512
MAX_POWER = 128


def work_out(expression: str) -> Fraction:
    """The value of an expression.

    Raises:
        ToolError: It is none, divides by zero, or a number in it is too large.
    """
    if len(expression) > MAX_CHARS:
        raise ToolError(f"the expression has {len(expression)} characters, at most {MAX_CHARS} are read")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ToolError(f"{expression!r:.80} is no expression of numbers, + - * / // % ** and ( )") from error
    return _value(tree.body)


def written(value: Fraction) -> str:
    """A number for reading: whole, or with at most 10 decimals."""
    if value.denominator == 1:
        return str(value.numerator)
    scaled = round(abs(value) * 10**10)
    whole, decimals = divmod(scaled, 10**10)
    sign = "-" if value < 0 else ""
    return f"{sign}{whole}.{decimals:010d}".rstrip("0").rstrip(".")


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            if number != number or abs(number) == float("inf"):
                raise ToolError("a number is too large")
            found = Fraction(number) if isinstance(number, int) else Fraction(repr(number))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            found = -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            found = _value(operand)
        case ast.BinOp(left=left, op=op, right=right):
            found = _combined(op, _value(left), _value(right))
        case _:
            raise ToolError(f"{ast.unparse(node)[:60]!r} is not allowed: only numbers, + - * / // % ** and ( )")
    if max(found.numerator.bit_length(), found.denominator.bit_length()) > MAX_BITS:
        raise ToolError("a number is too large")
    return found


def _combined(op: ast.operator, left: Fraction, right: Fraction) -> Fraction:
    match op:
        case ast.Add():
            return left + right
        case ast.Sub():
            return left - right
        case ast.Mult():
            return left * right
        case ast.Div() | ast.FloorDiv() | ast.Mod() if right == 0:
            raise ToolError("division by zero")
        case ast.Div():
            return left / right
        case ast.FloorDiv():
            return Fraction(left // right)
        case ast.Mod():
            return left % right
        case ast.Pow():
            if right.denominator != 1 or abs(right) > MAX_POWER:
                raise ToolError(f"only whole exponents from -{MAX_POWER} to {MAX_POWER} are allowed")
            if left == 0 and right < 0:
                raise ToolError("division by zero")
            return Fraction(left ** int(right))
    raise ToolError("only + - * / // % ** and ( ) are allowed; a power is written **")


class Calculator(ToolEnvironment):
    """Items bring a question and an answer (``task.name = "gsm8k"``, say); without them, sums are made up from the seed.

    Args:
        style: ``tools``: schemas and messages of role tool, for chat templates that know them; ``text``: the tool is explained
            in the question; ``compact``: no chat template: a reply that ends in ``=`` is an expression, anything else the
            answer, behind ``#`` or its last number.
        max_moves: Replies of an episode, the answer included.
        max_terms: Numbers of a made-up question, 2 to this.
        max_result_chars: Longer results are cut.
    """

    @checked
    def __init__(
        self,
        *,
        style: Literal["tools", "text", "compact"] = "tools",
        max_moves: PositiveInt = 6,
        max_terms: Annotated[int, Field(ge=2, le=20)] = 4,
        max_result_chars: Annotated[int, Field(ge=16)] = 200,
    ) -> None:
        super().__init__(max_moves=max_moves, max_result_chars=max_result_chars, in_text=style == "text")
        self._compact, self._max_terms = style == "compact", max_terms
        self._tools = {} if self._compact else {"calculate": Tool(self.calculate)}
        self._answer_is = ""

    @property
    def tools(self) -> Mapping[str, Tool]:
        return self._tools

    def calculate(self, expression: str) -> str:
        """Work out an expression of numbers, + - * / // % ** and parentheses.

        Args:
            expression: What to work out, such as 12 * (3 + 4)
        """
        return written(work_out(expression))

    def reset(self, item: TaskItem, seed: int) -> Observation:
        """Begin an episode."""
        if not self._compact:
            return super().reset(item, seed)
        self._left = self.max_moves
        return self.begin(item, seed)

    def begin(self, item: TaskItem, seed: int) -> Observation:
        if not item.question and not item.messages:
            question, self._answer_is = self._made_up(random.Random(seed))
            return Observation(text=question)
        if item.answer is None:
            raise ValueError(f"{item.where or 'the item'} has no answer: calculator judges by it")
        self._answer_is = item.answer
        return Observation(messages=tuple(item.messages)) if item.messages else Observation(text=item.question)

    def step(self, reply: str) -> Step:
        """Work out, or judge."""
        if not self._compact or self._left == 0:
            return super().step(reply)
        line = reply.strip().rpartition("\n")[2].strip()
        if not line.endswith("="):
            return super().step(reply)
        self._left -= 1
        try:
            result, bad = written(work_out(line.rstrip("= "))), 0.0
        except ToolError:
            result, bad = "no", 1.0
        over = self.abandon() if self._left == 0 else Step(text=result)
        counts = {"moves": 1.0, "calls": 1.0, "bad_calls": bad}
        return Step(text=over.text, done=over.done, parts={**counts, **over.parts})

    def finish(self, reply: str) -> Step:
        # In the compact form the answer stands behind one #, which the judge knows as four.
        given = re.sub(r"#+", "#### ", reply) if self._compact else reply
        score = judge_answer(given, self._answer_is)
        return Step(reward=score.value, done=True, parts=score.parts)

    def abandon(self) -> Step:
        return Step(text="No reply is left.", done=True, parts={"correct": 0.0, "answered": 0.0})

    def random_reply(self, rng: random.Random) -> str:
        """A call or an answer: for trying the environment out."""
        a, b = rng.randint(1, 99), rng.randint(1, 99)
        sign = rng.choice("+-*")
        if rng.random() < 0.3:
            return f"#{a}" if self._compact else f"The answer is {a}."
        if self._compact:
            return f"{a}+{b}="
        return f'<tool_call>{{"name": "calculate", "arguments": {{"expression": "{a} {sign} {b}"}}}}</tool_call>'

    def _made_up(self, rng: random.Random) -> tuple[str, str]:
        numbers = [rng.randint(2, 99) for _ in range(rng.randint(2, self._max_terms))]
        signs = ["+" if self._compact else rng.choice("+-*") for _ in numbers[1:]]
        expression = str(numbers[0]) + "".join(f" {s} {n}" for s, n in zip(signs, numbers[1:], strict=True))
        answer = str(work_out(expression))
        if self._compact:
            return f"{expression.replace(' ', '')} =", answer
        return f"What is {expression}?", answer
