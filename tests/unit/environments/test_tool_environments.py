"""Schemas from methods, calls answered, errors shown or raised, results cut; the calculator; classes in TRL's shape."""

import asyncio
import enum
import json
import random
from typing import Annotated, Any, Literal

import numpy as np
import pytest
import torch
from calculator import Calculator, work_out, written
from pydantic import Field

from llamarl.data.items import TaskItem
from llamarl.environments.adapters.trl import TrlEnvironment
from llamarl.environments.tools import BadArguments, Tool, ToolError, cut


class Kind(enum.Enum):
    TEA = "tea"
    COFFEE = "coffee"


def plain(a: int, b: float = 1.5) -> str:
    """Add two numbers.

    Args:
        a: The first one.
        b: The second one,
            which has a default.

    Returns:
        Their sum.
    """
    return str(a + b)


def odd(
    kind: Kind,
    size: Literal["small", "large"],
    extras: list[str],
    prices: dict[str, float],
    pair: tuple[int, str],
    maybe: int | None = None,
    either: int | str = 1,
    title: Any = None,
) -> None:
    """Order something.

    It may take long.

    Args:
        kind: Which.
        size: How large.
        extras: What else.
        prices: What it costs: a table.
        pair: Two things.
        maybe: Perhaps.
        either: One or the other.
        title: Anything.

    Raises:
        ValueError: Never.
    """  # fmt: skip


def nothing() -> dict[str, int]:
    """Look around."""
    return {"seen": 3}


def test_a_schema_has_names_types_enums_and_descriptions() -> None:
    assert Tool(plain).schema == {
        "type": "function",
        "function": {
            "name": "plain",
            "description": "Add two numbers.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "description": "The first one."},
                    "b": {"type": "number", "description": "The second one, which has a default."},
                },
                "required": ["a"],
            },
        },
    }
    assert Tool(odd).schema["function"]["description"] == "Order something.\n\nIt may take long."
    parameters = Tool(odd).schema["function"]["parameters"]
    assert parameters["required"] == ["kind", "size", "extras", "prices", "pair"]
    text, number = {"type": "string"}, {"type": "integer"}
    assert parameters["properties"] == {
        "kind": {"type": "string", "enum": ["tea", "coffee"], "description": "Which."},
        "size": {"type": "string", "enum": ["small", "large"], "description": "How large."},
        "extras": {"type": "array", "items": text, "description": "What else."},
        "prices": {
            "type": "object",
            "additionalProperties": {"type": "number"},
            "description": "What it costs: a table.",
        },
        "pair": {
            "type": "array",
            "prefixItems": [number, text],
            "minItems": 2,
            "maxItems": 2,
            "description": "Two things.",
        },
        "maybe": {"anyOf": [number, {"type": "null"}], "description": "Perhaps."},
        "either": {"anyOf": [number, text], "description": "One or the other."},
        "title": {"description": "Anything."},
    }
    assert Tool(nothing).schema["function"]["parameters"] == {"type": "object", "properties": {}}


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("def f(a: int): pass", "no docstring"),
        ('def f(a): "Doc.\\n\\nArgs:\\n    a: x"', "no annotation"),
        ('def f(a: int): "Doc."', "no line under Args"),
        ('def f(*a: int): "Doc."', "given by name"),
        ('def f(a: slice): "Doc.\\n\\nArgs:\\n    a: x"', "no JSON schema"),
    ],
)
def test_a_method_that_cannot_be_a_tool_says_why(source: str, why: str) -> None:
    names: dict[str, Any] = {}
    exec(source, names)
    with pytest.raises(ValueError, match=why):
        Tool(names["f"])


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({}, "a: Field required"),
        ({"a": "three"}, "a: Input should be a valid integer"),
        ({"a": 1, "c": 2}, "c: Extra inputs are not permitted"),
        ({"a": [1]}, "a: Input should be a valid integer"),
    ],
)
def test_wrong_arguments_say_what_was_expected(arguments: dict[str, Any], why: str) -> None:
    with pytest.raises(BadArguments) as caught:
        Tool(plain).checked(arguments)
    assert why in str(caught.value) and "Expected plain(a: integer; b: number, optional)" in str(caught.value)


def test_quoted_numbers_are_taken() -> None:
    assert Tool(plain).checked({"a": "3"}) == {"a": 3}


def test_lists_and_objects_in_text_are_taken_and_text_stays() -> None:
    def put(rows: list[int], facts: dict[str, int], note: str, side: Literal[4, 6]) -> None:
        """Put.

        Args:
            rows: Numbers.
            facts: More.
            note: Words.
            side: Of two.
        """

    given = {"rows": "[1, 2]", "facts": '{"x": 3}', "note": "[4]", "side": "6"}
    assert Tool(put).checked(given) == {"rows": [1, 2], "facts": {"x": 3}, "note": "[4]", "side": 6}
    with pytest.raises(BadArguments, match="rows: Input should be a valid list"):
        Tool(put).checked({**given, "rows": "[1"})


def test_a_list_or_nothing_in_text_is_taken_where_it_may_be_left_out() -> None:
    def find(rows: list[int] | None = None, most: int | None = 5, note: str | None = None, key: Any | None = 0) -> None:
        """Find.

        Args:
            rows: Numbers.
            most: How many.
            note: Words.
            key: Whatever.
        """

    assert Tool(find).checked({"rows": "[1, 2]", "most": "3", "note": "[4]"}) == {
        "rows": [1, 2],
        "most": 3,
        "note": "[4]",
    }
    assert Tool(find).checked({"rows": "null", "most": "null"}) == {"rows": None, "most": None}
    assert Tool(find).checked({"key": "12"}) == {"key": "12"}


def test_the_range_of_an_annotated_parameter_is_shown_and_held() -> None:
    def pick(count: Annotated[int, Field(ge=1, le=10)]) -> None:
        """Pick.

        Args:
            count: How many.
        """

    properties = Tool(pick).schema["function"]["parameters"]["properties"]
    assert properties == {"count": {"type": "integer", "minimum": 1, "maximum": 10, "description": "How many."}}
    with pytest.raises(BadArguments, match="less than or equal to 10"):
        Tool(pick).checked({"count": 999})


class Shop:
    """TRL's shape."""

    def reset(self, stock: int, **row: Any) -> str:
        self.stock, self.row = stock, row
        return f" There are {stock}."

    def buy(self, number: int) -> str:
        """Buy apples.

        Args:
            number: How many.
        """
        if number > self.stock:
            raise ValueError("not so many")
        self.stock -= number
        return f"{self.stock} left"

    async def look(self) -> dict[str, int]:
        """Count the apples."""
        return {"apples": self.stock}

    def get_reward(self) -> float:
        return float(self.stock == 0)

    def _hidden(self) -> None: ...


class Silent(Shop):
    def get_reward(self) -> float:
        return None  # type: ignore[return-value]


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


ITEM = TaskItem(question="Buy all apples.", answer="x", metadata={"stock": 5})


def test_a_reward_that_is_no_number_is_told_with_what_it_was() -> None:
    shop = TrlEnvironment(Silent)
    shop.reset(ITEM, 0)
    with pytest.raises(TypeError, match=r"Silent.get_reward\(\) returned NoneType None, expected a number"):
        shop.finish("done")


def test_a_class_of_trl_is_played_by_its_methods() -> None:
    shop = TrlEnvironment(Shop)
    opened = shop.reset(ITEM, 3)
    assert opened.text == "Buy all apples. There are 5."
    assert [tool["function"]["name"] for tool in opened.tools] == ["buy", "look"]
    one = shop.step(call("buy", number=2) + call("look"))
    assert one.messages == (
        {"role": "tool", "name": "buy", "content": "3 left"},
        {"role": "tool", "name": "look", "content": '{"apples": 3}'},
    )
    assert one.parts == {"moves": 1.0, "calls": 2.0, "bad_calls": 0.0} and not one.done
    two = shop.step(call("buy", number=9))
    assert two.messages[0]["content"] == "Error: ValueError: not so many"
    shop.step(call("buy", number=3))
    end = shop.step("Done.")
    assert end.done and end.reward == 1.0
    assert shop.reset(ITEM, 3).text == opened.text  # an instance of its own for each episode


@pytest.mark.parametrize("reward", [np.float32(0.25), np.int64(3), np.bool_(True), np.array(0.5), torch.tensor(0.5), 2])
def test_a_reward_of_numpys_is_a_number_too(reward: Any) -> None:
    class Left:
        def reset(self) -> None:
            self.reward = reward

        def look(self) -> str:
            """Look."""
            return "nothing"

    shop = TrlEnvironment(Left)
    shop.reset(TaskItem(question="How many?", answer="7"), 0)
    assert shop.finish("The answer is 7").reward == float(reward)


def test_what_an_instance_draws_when_it_is_made_repeats() -> None:
    class Guess:
        def __init__(self) -> None:
            self.secret = random.random()

        def reset(self) -> str:
            return f" {self.secret} {random.random()}"

        def look(self) -> str:
            """Look."""
            return ""

    one = TrlEnvironment(Guess)
    assert len({one.reset(ITEM, 3).text, one.reset(ITEM, 3).text, TrlEnvironment(Guess).reset(ITEM, 3).text}) == 1


def test_calls_that_are_async_find_the_same_loop() -> None:
    class Shelf:
        async def reset(self) -> None:
            self.loop = asyncio.get_running_loop()  # a connection belongs to one

        async def look(self) -> str:
            """Look."""
            return f"open: {not self.loop.is_closed() and self.loop is asyncio.get_running_loop()}"

    shop = TrlEnvironment(Shelf)
    shop.reset(ITEM, 0)
    assert [shop.step(call("look")).messages[0]["content"] for _ in range(2)] == ["open: True"] * 2


@pytest.mark.parametrize(
    ("reply", "told"),
    [
        (call("bye", number=1), "Error: there is no tool 'bye'. Did you mean buy? Tools: buy(number: integer); look()"),
        (call("buy", count=1), "Error: number: Field required; count: Extra inputs are not permitted. Expected buy(number: integer)"),
        ("<tool_call>buy 1</tool_call>", "Error: this is no JSON"),
        (call("reset", stock=9), "Error: there is no tool 'reset'"),
        (call("_hidden"), "Error: there is no tool '_hidden'"),
    ],
)  # fmt: skip
def test_a_bad_call_is_answered_with_text(reply: str, told: str) -> None:
    shop = TrlEnvironment(Shop)
    shop.reset(ITEM, 0)
    step = shop.step(reply)
    assert step.messages[0]["content"].startswith(told)
    assert step.messages[0]["role"] == "tool" and step.parts["bad_calls"] == 1.0 and not step.done


def test_errors_fail_the_sample_where_the_class_is_told_so() -> None:
    shop = TrlEnvironment(Shop, show_errors=False)
    shop.reset(ITEM, 0)
    with pytest.raises(ValueError, match="not so many"):
        shop.step(call("buy", number=9))


def test_the_last_move_ends_the_episode_even_with_a_call() -> None:
    shop = TrlEnvironment(Shop, max_moves=1)
    shop.reset(ITEM, 0)
    end = shop.step(call("buy", number=5))
    assert end.done and end.reward == 1.0 and end.messages == ()


def test_more_calls_than_are_run_are_told() -> None:
    shop = TrlEnvironment(Shop)
    shop.reset(ITEM, 0)
    step = shop.step(call("look") * 20)
    assert len(step.messages) == 17 and step.messages[-1]["content"].startswith("Only 16 calls")


def test_tools_in_text_need_no_template() -> None:
    shop = TrlEnvironment(Shop, in_text=True)
    opened = shop.reset(ITEM, 0)
    assert opened.tools == () and "- buy(number: integer): Buy apples." in opened.text and "<tool_call>" in opened.text
    assert shop.step(call("look") + call("nope")).text.startswith('look: {"apples": 5}\nnope: Error: there is no tool')


def test_long_results_are_cut_with_a_word() -> None:
    assert cut("x" * 30, 10) == "x" * 10 + "\n... (cut after 10 of 30 characters)"
    assert cut("a\ud800b", 10) == "a?b"  # half of a surrogate pair cannot be written as UTF-8


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1 + 2 * 3", "7"), ("(1 + 2) * 3", "9"), ("7 / 2", "3.5"), ("7 // 2", "3"), ("-7 // 2", "-4"), ("7 % 4", "3"),
        ("2 ** 10", "1024"), ("2 ** -2", "0.25"), ("0.1 + 0.2", "0.3"), ("1 / 3", "0.3333333333"), ("-(3 - 5)", "2"),
        ("1_000 * 2", "2000"), ("1e3", "1000"), ("-1/3", "-0.3333333333"), ("2 / 3 * 3", "2"),
    ],
)  # fmt: skip
def test_the_calculator_is_exact(expression: str, value: str) -> None:
    assert written(work_out(expression)) == value


@pytest.mark.parametrize(
    "expression",
    [
        "", "1 +", "__import__('os')", "abs(1)", "a", "1 if 1 else 2", "[1]", "1, 2", "True + 1", "1 < 2", "2 ^ 3", "1j", "'a' * 9",
        "1 / 0", "1 % 0", "0 ** -1", "2 ** 0.5", "9 ** 9 ** 9", "(2 ** 128) ** 128", "1e999", "9" * 400, "(" * 250 + "1",
        "2 ** 1000000", "lambda: 1", "(x := 1)", "f'{1}'", "10 ** 100 * 10 ** 100", "...", "~1", "1 << 9",
    ],
)  # fmt: skip
def test_the_calculator_refuses_everything_else_with_text(expression: str) -> None:
    with pytest.raises(ToolError):
        work_out(expression)


def test_a_calculator_episode_from_question_to_answer() -> None:
    item = TaskItem(question="6 boxes of 17 eggs, 5 eggs break. How many are left?", answer="97")
    game = Calculator()
    opened = game.reset(item, 0)
    assert opened.text == item.question and opened.tools[0]["function"]["name"] == "calculate"
    assert game.step(call("calculate", expression="6 * 17 - 5")).messages[0]["content"] == "97"
    assert (
        game.step(call("calculate", expression="6 x 17"))
        .messages[0]["content"]
        .startswith("Error: '6 x 17' is no expression")
    )
    end = game.step("There are 97 eggs left.")
    assert (end.reward, end.done, end.parts["correct"]) == (1.0, True, 1.0)
    game.reset(item, 0)
    assert game.step("There are 96.").reward == 0.0


def test_the_compact_calculator_works_out_lines_that_end_in_an_equals_sign() -> None:
    game = Calculator(style="compact", max_moves=3)
    question = game.reset(TaskItem(question=""), 4).text
    assert question.endswith(" =")
    step = game.step(question)
    assert step.text.isdigit() and step.parts["calls"] == 1.0
    assert game.step("x=").text == "no"
    assert game.step(f"#{step.text}").reward == 1.0
    game.reset(TaskItem(question=""), 4)
    assert [game.step("1=").done for _ in range(3)] == [False, False, True]


def test_an_item_without_answer_cannot_be_judged() -> None:
    with pytest.raises(ValueError, match="no answer"):
        Calculator().reset(TaskItem(question="What?"), 0)
