"""longstraw/SQLAnalyst-v0: questions over a SQLite database, through a tool that cannot write.

Idea: a seed makes a small shop (customers, products, orders) and a question whose answer is a number or a name. The tool's
connection has an authorizer that lets nothing pass but reading, and a progress handler that ends long queries. The true answer
is computed when the task is made and stays outside the database.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Generator, Mapping
from typing import Any, ClassVar

import numpy as np

from longstraw_agents.envs.rewards import Episode, Grade, RewardPart
from longstraw_agents.envs.tool_env import ToolEnv, in_split
from longstraw_agents.envs.tools import ToolLimits, tool
from longstraw_agents.errors import ConfigError, ToolFault

SCHEMA = """
CREATE TABLE customers (id INTEGER PRIMARY KEY, name TEXT NOT NULL, city TEXT NOT NULL);
CREATE TABLE products (id INTEGER PRIMARY KEY, name TEXT NOT NULL, price INTEGER NOT NULL);
CREATE TABLE orders (id INTEGER PRIMARY KEY, customer_id INTEGER NOT NULL REFERENCES customers, product_id INTEGER NOT NULL
  REFERENCES products, quantity INTEGER NOT NULL, month INTEGER NOT NULL);
"""
CITIES = ("Aarhus", "Bergen", "Cadiz", "Dresden", "Evora", "Fes", "Ghent", "Hilo")
GOODS = ("anvil", "basket", "candle", "drum", "easel", "flute", "globe", "hammock", "inkwell", "jar", "kite", "lantern")
NAMES = ("Ada", "Bo", "Cy", "Dee", "Eli", "Fay", "Gus", "Hal", "Ida", "Jo", "Kai", "Lea", "Max", "Nia", "Oz", "Pia", "Quin")

#: question -> query; {good}, {city}, {month} are the task's
QUESTIONS: tuple[tuple[str, str], ...] = (
    (
        "How many pieces of {good} were ordered by customers from {city}?",
        "SELECT COALESCE(SUM(quantity), 0) FROM orders JOIN products ON products.id = product_id JOIN customers ON "
        "customers.id = customer_id WHERE products.name = '{good}' AND city = '{city}'",
    ),
    (
        "What is the total value (price times quantity) of all orders in month {month}?",
        "SELECT COALESCE(SUM(price * quantity), 0) FROM orders JOIN products ON products.id = product_id WHERE month = {month}",
    ),
    (
        "How many different customers ordered {good} in month {month} or later?",
        "SELECT COUNT(DISTINCT customer_id) FROM orders JOIN products ON products.id = product_id WHERE products.name = "
        "'{good}' AND month >= {month}",
    ),
    (
        "Which customer spent the most in all? Give the name; where several did, the first by alphabet.",
        "SELECT customers.name FROM customers JOIN orders ON customers.id = customer_id JOIN products ON products.id = "
        "product_id GROUP BY customers.id ORDER BY SUM(price * quantity) DESC, customers.name LIMIT 1",
    ),
    (
        "How many customers from {city} have no order in month {month}?",
        "SELECT COUNT(*) FROM customers WHERE city = '{city}' AND id NOT IN "
        "(SELECT customer_id FROM orders WHERE month = {month})",
    ),
)

_READING = frozenset({sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, 33})  # 33: SQLITE_RECURSIVE
#: The last five: one call may take seconds in C, and SQLite looks at the clock only between rows.
_REFUSED_FUNCTIONS = frozenset(
    {"load_extension", "readfile", "writefile", "edit", "fts3_tokenizer", "printf", "format", "trim", "ltrim", "rtrim"}
)


class SQLAnalystEnv(ToolEnv):
    """One question, a schema, a query tool."""

    instructions: ClassVar[str] = "Answer the question from the SQLite database. Give only the number or the name."
    option_defaults: ClassVar[Mapping[str, Any]] = {"orders": 400, "customers": 40}
    reward_parts: ClassVar[tuple[RewardPart, ...]] = (RewardPart("query", weight=0.1), RewardPart("answer", weight=1.0))
    max_turns: ClassVar[int] = 12
    query_seconds: ClassVar[float] = 2.0
    max_rows: ClassVar[int] = 50
    max_chars: ClassVar[int] = 100_000

    def new_task(self, rng: np.random.Generator, split: str) -> str:
        """One task from the random numbers of its seed."""
        if self.options["orders"] < 1 or self.options["customers"] < 1:
            raise ConfigError("orders and customers must be at least 1")
        self.close()
        self._database = self._build(rng)
        while True:
            pick = {
                "good": str(rng.choice(GOODS)), "city": str(rng.choice(CITIES)), "month": int(rng.integers(1, 13))
            }  # fmt: skip
            question, query = QUESTIONS[int(rng.integers(len(QUESTIONS)))]
            self.query_text = query.format(**pick)
            (self.truth,) = self._database.execute(self.query_text).fetchone()
            total = self._database.execute("SELECT SUM(quantity * product_id * customer_id) FROM orders").fetchone()[0]
            if in_split(f"{self.query_text} {total}", split):
                break
        self._database.set_authorizer(_authorize)
        return f"{question.format(**pick)}\n\nThe database:\n{SCHEMA.strip()}"

    def _build(self, rng: np.random.Generator) -> sqlite3.Connection:
        database = sqlite3.connect(":memory:", check_same_thread=False, isolation_level=None)  # tools run in threads
        database.executescript(SCHEMA)
        customers, orders = self.options["customers"], self.options["orders"]
        names = [f"{rng.choice(NAMES)} {chr(65 + int(rng.integers(26)))}{i}" for i in range(customers)]
        rows = [(i, names[i], str(rng.choice(CITIES))) for i in range(customers)]
        database.executemany("INSERT INTO customers VALUES (?, ?, ?)", rows)
        prices = [(i, name, int(rng.integers(1, 200))) for i, name in enumerate(GOODS)]
        database.executemany("INSERT INTO products VALUES (?, ?, ?)", prices)
        columns = [rng.integers(0, high, orders) for high in (customers, len(GOODS))]
        columns += [rng.integers(1, 10, orders), rng.integers(1, 13, orders)]
        lines = [(i, *(int(column[i]) for column in columns)) for i in range(orders)]
        database.executemany("INSERT INTO orders VALUES (?, ?, ?, ?, ?)", lines)
        # together these bound what one row can take, in memory and in time: without, a thousand columns of a megabyte each
        database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 4096)
        database.setlimit(sqlite3.SQLITE_LIMIT_COLUMN, 64)
        database.setlimit(sqlite3.SQLITE_LIMIT_SQL_LENGTH, 4000)
        database.setlimit(sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, 256)
        database.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
        return database

    @tool(limits=ToolLimits(seconds=10, output_chars=4000))
    def query(self, sql: str) -> str:
        """Run one SELECT statement and show at most 50 rows.

        Args:
            sql: the statement
        """
        deadline = time.monotonic() + self.query_seconds
        self._database.set_progress_handler(lambda: int(time.monotonic() > deadline), 1000)
        try:
            cursor = self._database.execute(sql)
            lines = self._lines(cursor)
        except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
            reason = "it took too long" if time.monotonic() > deadline else str(error)
            raise ToolFault(f"the query failed: {reason}") from None
        finally:
            self._database.set_progress_handler(None, 0)
        return "\n".join([" | ".join(column[0] for column in cursor.description or ()), *lines])

    def _lines(self, cursor: sqlite3.Cursor) -> list[str]:
        """Rows as text, up to `max_rows` and `max_chars`; what comes after is not even fetched."""
        lines: list[str] = []
        size = 0
        for row in cursor:
            if len(lines) == self.max_rows or size > self.max_chars:
                return [*lines, "[more rows were left out]"]
            lines.append(" | ".join(str(value) for value in row))
            size += len(lines[-1])
        return lines

    def grade_turn(self, episode: Episode) -> Mapping[str, float]:
        """Parts of the reward that a turn earned."""
        worked = [any(call.error is None for call in calls) for calls in episode.calls]
        return {"query": float(worked[-1] and not any(worked[:-1]))}

    def grade(self, episode: Episode) -> Grade:
        """The outcome and the parts of the reward, at the end."""
        right = (episode.answer or "").strip() == str(self.truth)
        return Grade(right, {"answer": float(right)})

    def solver(self) -> Generator[str, str, None]:
        """Actions that earn everything."""
        call = json.dumps({"name": "query", "arguments": {"sql": self.query_text}})
        seen = yield f"<tool_call>{call}</tool_call>"
        yield f"<answer>{seen.splitlines()[1]}</answer>"

    def close(self) -> None:
        """Close the database."""
        if getattr(self, "_database", None) is not None:
            self._database.close()


def _authorize(action: int, first: str | None, second: str | None, database: str | None, trigger: str | None) -> int:
    if action not in _READING or (action == sqlite3.SQLITE_FUNCTION and second in _REFUSED_FUNCTIONS):
        return sqlite3.SQLITE_DENY
    return sqlite3.SQLITE_OK
