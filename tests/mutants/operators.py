"""The mutations: Cosmic Ray's, without those that repeat others, and two of our own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import parso
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Operator
from cosmic_ray.plugins import get_operator
from parso.python.tree import Keyword

# Of the others that a comparison could be, the neighbours and the opposite: a test that tells them apart from it tells
# the rest apart, too (Kaminski, Ammann and Offutt, "Improving logic-based testing", 2013).
_COMPARISONS = {
    "Lt": ("LtE", "GtE", "NotEq"),
    "LtE": ("Lt", "Gt", "Eq"),
    "Gt": ("GtE", "LtE", "NotEq"),
    "GtE": ("Gt", "Lt", "Eq"),
    "Eq": ("NotEq",),
    "NotEq": ("Eq",),
    "Is": ("IsNot",),
    "IsNot": ("Is",),
}
_BINARY = {
    "Add": "Sub",
    "Sub": "Add",
    "Mul": "Div",
    "Div": "Mul",
    "FloorDiv": "Mul",
    "Mod": "FloorDiv",
    "Pow": "Mul",
    "LShift": "RShift",
    "RShift": "LShift",
    "BitOr": "BitAnd",
    "BitAnd": "BitOr",
    "BitXor": "BitAnd",
}
_NAMES = (
    *(f"ReplaceComparisonOperator_{one}_{other}" for one, others in _COMPARISONS.items() for other in others),
    *(f"ReplaceBinaryOperator_{one}_{other}" for one, other in _BINARY.items()),
    "ReplaceUnaryOperator_Delete_Not",
    "ReplaceUnaryOperator_Delete_USub",
    "AddNot",
    "ReplaceAndWithOr",
    "ReplaceOrWithAnd",
    "ReplaceTrueWithFalse",
    "ReplaceFalseWithTrue",
    "ReplaceBreakWithContinue",
    "ReplaceContinueWithBreak",
    "ExceptionReplacer",
    "NumberReplacer",
    "ZeroIterationForLoop",
)
_DELETED = ("expr_stmt", "return_stmt", "raise_stmt", "del_stmt", "assert_stmt", "atom_expr", "yield_expr")


class DeleteStatement(Operator):
    """``pass`` in place of a statement of a function."""

    def mutation_positions(self, node: Any) -> Iterator[tuple[Any, Any]]:
        if node.type == "simple_stmt" and _is_in_function(node) and _has_effect(node.children[0]):
            yield node.start_pos, node.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        del index
        first = node.children[0].get_first_leaf()
        node.children[0] = Keyword("pass", first.start_pos, prefix=first.prefix)
        return node

    @classmethod
    def examples(cls) -> tuple[()]:
        return ()


class ReplaceIn(Operator):
    """``in`` and ``not in`` in each other's place."""

    def mutation_positions(self, node: Any) -> Iterator[tuple[Any, Any]]:
        if node.type == "comparison" and node.children[1].get_code().strip() in ("in", "not in"):
            yield node.start_pos, node.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        del index
        is_in = node.children[1].get_code().strip() == "in"
        node.children[1] = parso.parse(" not in" if is_in else " in")
        return node

    @classmethod
    def examples(cls) -> tuple[()]:
        return ()


@dataclass(frozen=True)
class Mutant:
    """A mutant of a module.

    Attributes:
        operator: The mutation.
        occurrence: Which of the places where it is possible.
    """

    operator: Operator
    occurrence: int

    def code(self, source: str) -> str:
        """Return the code of the mutant.

        Args:
            source: That of the module.
        """
        code: str = mutate_code(source, self.operator, self.occurrence)
        return code


def mutants_of(source: str) -> list[Mutant]:
    """Return the mutants of a module. Some are no code that Python compiles.

    Args:
        source: The code of the module.
    """
    nodes = list(ast_nodes(get_ast(source)))
    operators = (*(get_operator(f"core/{name}")() for name in _NAMES), DeleteStatement(), ReplaceIn())
    found = []
    for operator in operators:
        places = [node for node in nodes for _ in operator.mutation_positions(node)]
        found += [Mutant(operator, number) for number, node in enumerate(places) if not _is_declaration(node)]
    return found


def _is_in_function(node: Any) -> bool:
    return parso.tree.search_ancestor(node, "funcdef") is not None


def _has_effect(statement: Any) -> bool:
    if statement.type == "expr_stmt":
        declared = statement.children[1]
        return declared.type != "annassign" or len(declared.children) > 2  # else it has no value
    return statement.type in _DELETED or (statement.type == "keyword" and statement.value == "return")


def _is_declaration(node: Any) -> bool:
    """Return whether a node is in an annotation, which nothing evaluates, in a decorator, or part of a signature."""
    while (parent := node.parent) is not None:
        if parent.type == "decorator" or (parent.type == "parameters" and node.type == "operator"):
            return True
        if parent.type in ("annassign", "tfpdef") and node is parent.children[1 if parent.type == "annassign" else -1]:
            return True
        if parent.type in ("funcdef", "lambdef") and node is parent.annotation:
            return True
        node = parent
    return False
