"""Reads a shell script as far as a training command needs it: variables, arrays, quotes, arithmetic, `if`. Nothing is
executed: what only a command knows, such as `$(date)`, stays in the text between `UNKNOWN` marks."""

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from dapo.tools.translate.values import Unknown, value_of

UNKNOWN = ("\ue000", "\ue001")  # around what is not known, in private-use letters
_NAME = re.compile(r"[A-Za-z_]\w*")
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(?:\[([^\]]*)\])?(\+?)=(.*)", re.DOTALL)
_DECLARES = ("export", "declare", "local", "readonly", "typeset")
_OPENS, _SEPARATES, _CLOSES = (
    ("if", "for", "while", "until", "case", "{"),
    ("then", "elif", "else", "do"),
    ("fi", "done"),
)
_TESTS = {"=": str.__eq__, "==": str.__eq__, "!=": str.__ne__}
_NUMBERS = {
    "-eq": int.__eq__,
    "-ne": int.__ne__,
    "-lt": int.__lt__,
    "-le": int.__le__,
    "-gt": int.__gt__,
    "-ge": int.__ge__,
}


def unknown(text: str) -> str:
    return f"{UNKNOWN[0]}{text}{UNKNOWN[1]}"


def is_known(value: Any) -> bool:
    return not first_unknown(value)


def first_unknown(value: Any) -> str:
    """Returns what is not known of a value; empty if all is."""
    if isinstance(value, str) and UNKNOWN[0] in value:
        return value.partition(UNKNOWN[0])[2].partition(UNKNOWN[1])[0]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return next(filter(None, map(first_unknown, inner)), "")


@dataclass(slots=True)
class Script:
    """commands: the words of each command that is no assignment, in order. notes: what could not be followed."""

    variables: dict[str, str | list[str]]
    arguments: Sequence[str] = ()
    commands: list[list[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def read(self, text: str) -> "Script":
        self._run(list(_commands(text)))
        return self

    def _run(self, commands: list[list[str]]) -> None:
        """Follows the commands. Of an `if` it takes the branch whose condition holds, of a loop its first round."""
        taken: list[bool | None] = []  # of each open block: whether its current branch counts; None: a branch did
        at = 0
        while at < len(commands):
            words = commands[at]
            at += 1
            while words and words[0] in (*_SEPARATES, *_CLOSES, "}", "!", "time", "exec", "esac", ";;"):
                first, words = words[0], words[1:]
                if first in (*_CLOSES, "}", "esac"):
                    if taken:
                        taken.pop()
                elif first in ("elif", "else") and taken:
                    outside = all(taken[:-1])
                    if taken[-1] is not False:
                        taken[-1] = None
                    elif first == "else":
                        taken[-1] = True
                    elif outside:
                        taken[-1] = self._holds(words)
                    if first == "elif":
                        words = []
            if not words:
                continue
            if words[0] in _OPENS:
                taken.append(self._opened(words) if all(taken) else None)
                continue
            if words[0] == "function" or (len(words) > 1 and words[1] == "()"):
                taken += [True] if "{" in words else []
                continue
            if taken and any(word == ")" for word in words[1:2]):  # a pattern of `case`
                words = words[2:]
            if words and all(taken):
                self._command(words)

    def _opened(self, words: list[str]) -> bool | None:
        if words[0] == "if":
            return self._holds(words[1:])
        if words[0] == "for" and len(words) > 3 and words[2] == "in":
            items = [one for word in words[3:] for one in self.expand(word)]
            self.variables[words[1]] = items[0] if items else ""
            if len(items) > 1:
                self.notes.append(f"`for {words[1]}`: of its {len(items)} rounds the first was read")
        elif words[0] == "case":
            self.notes.append(f"`{' '.join(words)}`: all its branches were read, one after the other")
        return True

    def _command(self, words: list[str]) -> None:
        if words[0] in _DECLARES:
            words = [word for word in words[1:] if not word.startswith("-")]
        rest = list(words)
        assigned: list[re.Match[str]] = []
        while rest and (found := _ASSIGNED.fullmatch(rest[0])):
            assigned.append(found)
            rest = rest[1:]
        expanded = [one for word in rest for one in self.expand(word)]
        if not expanded:
            for found in assigned:
                self._assign(*found.groups())
        else:
            self.commands.append(expanded)

    def _assign(self, name: str, index: str | None, plus: str, word: str) -> None:
        if word.startswith("(") and word.endswith(")"):
            items = [one for part in _words(word[1:-1]) for one in self.expand(part)]
            before = self.variables.get(name, [])
            self.variables[name] = [*(before if plus and isinstance(before, list) else []), *items]
        elif index is None:
            text = " ".join(self.expand(word, split=False))
            before = self.variables.get(name, "")
            self.variables[name] = before + text if plus and isinstance(before, str) else text

    def _holds(self, words: list[str]) -> bool:
        """Whether a test holds. What cannot be known, such as whether a file exists, counts as not."""
        if "&&" in words:
            at = words.index("&&")
            return self._holds([*words[:at], "]]"]) and self._holds(["[[", *words[at + 1 :]])
        if words[:1] and words[0] in ("[", "[[", "test"):
            parts = [" ".join(self.expand(word, split=False)) for word in words[1:] if word not in ("]", "]]")]
            wanted = True
            if parts[:1] == ["!"]:
                wanted, parts = False, parts[1:]
            if not any(UNKNOWN[0] in part for part in parts):
                match parts:
                    case ["-n" | "-z" as test, text]:
                        return (bool(text) == (test == "-n")) == wanted
                    case [left, test, right] if test in _TESTS:
                        same = fnmatchcase(left, right) if words[0] == "[[" else left == right
                        return (same == (test != "!=")) == wanted
                    case [left, test, right] if test in _NUMBERS and _whole(left) and _whole(right):
                        return bool(_NUMBERS[test](int(left), int(right))) == wanted
        self.notes.append(f"`if {_shown(' '.join(words))}` is not known here and counts as false")
        return False

    def expand(self, word: str, split: bool = True) -> list[str]:
        """Returns what a word stands for: usually one text, several where it names an array or an unquoted list."""
        found: list[str] = [""]
        quoted, at, seen = False, 0, False
        while at < len(word):
            letter = word[at]
            if letter == "'" and not quoted:
                end = word.find("'", at + 1)
                end = len(word) if end < 0 else end
                found[-1] += word[at + 1 : end]
                at, seen = end + 1, True
            elif letter == '"':
                quoted, at, seen = not quoted, at + 1, True
            elif letter == "\\" and at + 1 < len(word):
                kept = "\\" if quoted and word[at + 1] not in '$`"\\\n' else ""
                found[-1] += "" if word[at + 1] == "\n" else kept + word[at + 1]
                at, seen = at + 2, True
            elif letter in "$`":
                end = _end_of_expansion(word, at)
                values = self._expansion(word[at:end])
                if not quoted and split:
                    values = [part for value in values for part in _split(value)]
                if values:
                    found[-1] += values[0]
                    found += values[1:]
                    seen = True
                at = end
            else:
                found[-1] += letter
                at, seen = at + 1, True
        return found if seen else []

    def _expansion(self, text: str) -> list[str]:
        if text.startswith("$((") and text.endswith("))"):
            return [self._arithmetic(text[3:-2])]
        if text == "$" or len(text) == 1:
            return [text]
        if text.startswith("${") and text.endswith("}"):
            return self._parameter(text[2:-1])
        if text in ("$@", "$*"):
            return list(self.arguments)
        if text == "$#":
            return [str(len(self.arguments))]
        if text == "$(pwd)":
            return self._variable("PWD")
        if text.startswith("$(") or text.startswith("`"):
            return [unknown(text)]
        return self._variable(text[1:])

    def _variable(self, name: str) -> list[str]:
        if name.isdecimal():
            return [self.arguments[int(name) - 1]] if 0 < int(name) <= len(self.arguments) else [unknown(f"${name}")]
        value = self.variables.get(name)
        if value is None:
            return [unknown(f"${name}")]
        return value[:1] if isinstance(value, list) else [value]

    def _parameter(self, inner: str) -> list[str]:
        if inner in ("@", "*"):
            return list(self.arguments)
        if not (head := re.match(r"(#|!)?(\w+)(?:\[([^\]]*)\])?", inner)):
            return [unknown(f"${{{inner}}}")]
        mark, name, index = head.groups()
        rest, value = inner[head.end() :], self.variables.get(name)
        if name.isdecimal() and 0 < int(name) <= len(self.arguments):
            value = self.arguments[int(name) - 1]
        if index in ("@", "*") and mark == "#" and isinstance(value, list):
            return [str(len(value))]
        if index in ("@", "*") and not rest and not mark:
            return list(value) if isinstance(value, list) else [value or ""]
        if index is not None and isinstance(value, list):
            number = self._arithmetic(index) if index not in ("@", "*") else ""
            value = value[int(number)] if _whole(number) and int(number) < len(value) else " ".join(value)
        elif isinstance(value, list):
            value = value[0] if value else ""
        if mark == "#" and value is not None and not rest:
            return [str(len(value))]
        if mark:
            return [unknown(f"${{{inner}}}")]
        if chosen := re.match(r"(:?)([-=+?])(.*)", rest, re.DOTALL):
            there = bool(value) if chosen[1] else value is not None
            if chosen[2] == "+":
                return self.expand(chosen[3], split=False) if there else [""]
            if not there and chosen[2] != "?":
                default = " ".join(self.expand(chosen[3], split=False))
                if chosen[2] == "=":
                    self.variables[name] = default
                return [default]
            rest = "" if there else rest
        if value is None or UNKNOWN[0] in value:
            return [unknown(f"${{{inner}}}") if value is None or rest else value]
        return [_edited(value, rest, self) if rest else value]

    def _arithmetic(self, text: str) -> str:
        inner = " ".join(self.expand(text.strip(), split=False))
        names: dict[str, ast.AST] = {}
        try:
            for name in _NAME.findall(inner):
                value = self.variables.get(name)
                names[name] = ast.parse(str(value).strip() or "0", mode="eval").body
            tree = ast.parse(inner.replace("&&", " and ").replace("/", "//"), mode="eval")
            return str(int(value_of(tree.body, names)))
        except (SyntaxError, ValueError, Unknown):
            return unknown(f"$(({_shown(text)}))")


def _edited(value: str, rest: str, script: Script) -> str:
    """Applies `%`, `#`, `/`, `,` or `^` of `${NAME...}`."""
    if found := re.match(r"(%%?|##?)(.*)", rest, re.DOTALL):
        pattern = " ".join(script.expand(found[2], split=False))
        ends = range(len(value) + 1) if found[1] in ("#", "%%") else range(len(value), -1, -1)
        for end in ends:
            part, left = (value[:end], value[end:]) if found[1][0] == "#" else (value[end:], value[:end])
            if fnmatchcase(part, pattern):
                return left
        return value
    if found := re.match(r"//?([^/]+)/?(.*)", rest, re.DOTALL):
        return value.replace(found[1], found[2], -1 if rest.startswith("//") else 1)
    if rest in (",,", "^^"):
        return value.lower() if rest == ",," else value.upper()
    return unknown(f"{value}{rest}")


def _whole(text: str) -> bool:
    return re.fullmatch(r"-?\d+", text) is not None


def _shown(text: str) -> str:
    return text.replace(UNKNOWN[0], "").replace(UNKNOWN[1], "")


def _split(value: str) -> list[str]:
    return [value] if UNKNOWN[0] in value else value.split()


def _end_of_expansion(text: str, at: int) -> int:
    """Returns where the expansion that begins at `at` ends."""
    if text[at] == "`":
        end = text.find("`", at + 1)
        return len(text) if end < 0 else end + 1
    follows = text[at + 1 : at + 2]
    if follows in ("{", "("):
        depth, close, quote = 0, {"{": "}", "(": ")"}[follows], ""
        for index in range(at + 1, len(text)):
            letter = text[index]
            if quote:
                quote = "" if letter == quote else quote
            elif letter in "'\"" and not (follows == "{" and letter == "'" and '"' in text[:at]):
                quote = letter
            elif letter == follows:
                depth += 1
            elif letter == close:
                depth -= 1
                if not depth:
                    return index + 1
        return len(text)
    if found := _NAME.match(text, at + 1):
        return found.end()
    return at + 2 if follows in [*"@*#?$!-0123456789"] and follows else at + 1


def _words(text: str) -> list[str]:
    return [word for command in _commands(text) for word in command]


def _commands(text: str) -> Iterator[list[str]]:
    """Yields the words of each command, quotes and expansions as they stand. An array is one word."""
    text = text.replace("\r\n", "\n")
    words: list[str] = []
    word, at, drop = "", 0, 0
    heredocs: list[str] = []

    def close() -> None:
        nonlocal word, drop
        if word and not drop:
            words.append(word)
        drop = max(0, drop - 1) if word else drop
        word = ""

    while at < len(text):
        letter = text[at]
        if letter in "'\"":
            end = at + 1
            while end < len(text) and text[end] != letter:
                if letter == '"' and text[end] in "$`":
                    end = max(end + 1, _end_of_expansion(text, end))
                else:
                    end += 2 if letter == '"' and text[end] == "\\" else 1
            word += text[at : end + 1]
            at = end + 1
        elif letter == "\\":
            word += "" if text[at + 1 : at + 2] == "\n" else text[at : at + 2]
            at += 2
        elif letter in "$`":
            end = _end_of_expansion(text, at)
            word += text[at:end]
            at = end
        elif letter == "(" and re.fullmatch(r"[A-Za-z_]\w*\+?=", word):
            end = _end_of_array(text, at)
            word += text[at:end]
            at = end
        elif letter == "#" and not word:
            end = text.find("\n", at)
            at = len(text) if end < 0 else end
        elif text.startswith("<<", at) and not text.startswith("<<<", at):
            found = re.compile(r"<<-?\s*(['\"]?)(\w+)\1").match(text, at)
            heredocs += [found[2]] if found else []
            at = found.end() if found else at + 2
        elif letter in "<>":
            word = "" if word.isdecimal() else word
            close()
            found = re.compile(r"[<>]+[&|]?").match(text, at)
            at, drop = found.end() if found else at + 1, 1
        elif letter.isspace() and letter != "\n":
            close()
            at += 1
        elif letter == "&" and drop:  # &1
            word += letter
            at += 1
        elif letter in "\n;&|":
            close()
            if words[:1] in (["[["], ["if"]) and text[at : at + 2] in ("&&", "||"):
                words.append(text[at : at + 2])
                at += 2
                continue
            if words:
                yield words
            words, drop = [], 0
            at += 1
            if letter == "\n":
                for mark in heredocs:
                    found = re.compile(rf"^\s*{re.escape(mark)}\s*$", re.MULTILINE).search(text, at)
                    at = found.end() if found else len(text)
                heredocs = []
        elif letter in "()":
            close()
            if text[at : at + 2] == "()":
                words.append("()")
                at += 1
            elif letter == ")":
                words.append(letter)
            at += 1
        else:
            word += letter
            at += 1
    close()
    if words:
        yield words


def _end_of_array(text: str, at: int) -> int:
    depth, index = 0, at
    while index < len(text):
        letter = text[index]
        if letter in "'\"":
            end = text.find(letter, index + 1)
            index = len(text) if end < 0 else end
        elif letter == "#" and text[index - 1].isspace():
            end = text.find("\n", index)
            index = len(text) if end < 0 else end
        elif letter == "$":
            index = _end_of_expansion(text, index) - 1
        elif letter in "()":
            depth += 1 if letter == "(" else -1
            if not depth:
                return index + 1
        index += 1
    return len(text)
