"""What of CUDA's syntax a host compiler cannot read, rewritten in a preprocessed source.

The preprocessor has put the headers in and taken the comments out, and has said in line markers where everything comes
from. After each rewriting the lines have the numbers that they had, and sanitizers, coverage and the
compiler name those.
"""

from __future__ import annotations

import re

# What a launch or a declaration cannot begin in, and the two words that it begins with.
TOKEN = re.compile(
    r"""
    R"(?P<delimiter>[^()\\\s]*)\(.*?\)(?P=delimiter)"     # raw strings
    | "(?:\\.|[^"\\\n])*"                                 # strings, of line markers too
    | \b[0-9](?:'?[\w.])*                                 # numbers, with their separators
    | '(?:\\.|[^'\\\n])+'                                 # characters
    | (?P<launch><<<)
    | (?P<shared>\b__shared__\b)
    """,
    re.VERBOSE | re.DOTALL,
)
MARKER = re.compile(r'^# (\d+) ("[^"\n]*").*\n', re.MULTILINE)  # also amid a statement, around a system header's macro
LONGEST_HEAD = 2000  # characters of a kernel's name with its template arguments
ALIGNMENT = re.compile(r"__attribute__\s*\(\(\s*aligned\s*\((.*?)\)\s*\)\)|alignas\s*\((.*?)\)", re.DOTALL)
QUALIFIERS = re.compile(
    r"(?:\b(?:extern|static|volatile|alignas\s*\([^()]*\))\s*|__attribute__\s*\(\([^;{}]*?\)\)\s*)*$"
)


class LaunchSyntaxError(Exception):
    """A launch or a declaration of a form that is not rewritten."""


def rewrite(source: str) -> str:
    """The source with its launches and `__shared__` variables as calls of the emulation."""
    places = [match for match in TOKEN.finditer(source) if match["launch"] or match["shared"]]
    for match in reversed(places):  # those before keep their places
        before = source[max(0, match.start() - LONGEST_HEAD) : match.start()]
        head, text, end = (_launch if match["launch"] else _declaration)(source, before, match)
        start = match.start() - len(head)
        source = source[:start] + _replaced(source[start:end], text) + source[end:]
    return source


def _launch(source: str, before: str, match: re.Match[str]) -> tuple[str, str, int]:
    """What stands before `<<<` and belongs to the launch, what the launch becomes, and where it ends."""
    close = source.find(">>>", match.end())
    opened = re.compile(r"\s*\(").match(source, close + 3)
    if close < 0 or opened is None:
        raise LaunchSyntaxError(f"no >>>( after {_excerpt(source, match.start())}")
    head = before[_kernel_start(before) :]
    kernel = MARKER.sub("", head).strip()
    configuration = _split(MARKER.sub("", source[match.end() : close]))
    if not kernel or not 2 <= len(configuration) <= 4:
        raise LaunchSyntaxError(f"no kernel<<<grid, block, shared, stream>>>: {_excerpt(source, match.start())}")
    configuration += ["0", "nullptr"][len(configuration) - 2 :]
    end = _closing(source, opened.end() - 1)
    arguments = MARKER.sub("", source[opened.end() : end]).strip()
    call = [*configuration, kernel, *([arguments] if arguments else [])]
    return head, f"::cuda_emulation::launch({', '.join(call)})", end + 1


def _kernel_start(text: str) -> int:
    """Where the name of the kernel that `text` ends with begins: `a::kernel<T, (n > 4)>`, `kernels[i]`, `(kernel)`."""
    i = len(text)
    while True:
        i = len(text[:i].rstrip())
        if i and text[i - 1] in ")]>":
            i = _opening(text, i - 1)
            continue
        i = re.search(r"(?:::\s*)?(?:\b\w+|)$", text[:i]).start()
        if not text[i:].startswith("::"):
            return i


def _declaration(source: str, before: str, match: re.Match[str]) -> tuple[str, str, int]:
    """The same for `__shared__ T a[N], b;` and `extern __shared__ T a[];`."""
    head = QUALIFIERS.search(before)[0]
    end = source.find(";", match.end())
    body = MARKER.sub("", f"{head} {source[match.end() : end]}")
    alignment = ALIGNMENT.search(body)
    aligned = (alignment[1] or alignment[2]).strip() if alignment else "1"
    dynamic = re.search(r"\bextern\b", body) is not None
    body = re.sub(r"\b(?:extern|static)\b", " ", ALIGNMENT.sub(" ", body))
    first, *others = (" ".join(part.split()) for part in _split(body))
    declared = re.fullmatch(r"(.*[\s>*&])(\w+)\s*((?:\[.*\])?)", first)
    if declared is None:
        raise LaunchSyntaxError(f"not a __shared__ variable: {_excerpt(source, match.start())}")
    kind = declared[1].strip()
    if dynamic:
        return head, f"{kind}* {declared[2]} = ::cuda_emulation::dynamic_shared<{kind}>();", end + 1
    variables = []
    for declarator in (declared[2] + declared[3], *others):
        name, bounds = re.fullmatch(r"(\w+)\s*(.*)", declarator).groups()
        call = f'::cuda_emulation::shared_variable<{kind}{bounds}, {aligned}>("{name}", [] {{}})'
        variables.append(f"auto& {name} = {call};")
    return head, " ".join(variables), end + 1


def _split(text: str) -> list[str]:
    """The parts between commas outside of brackets; `<` is one right behind a name, and a comparison behind a space."""
    parts, start, i = [], 0, 0
    while i < len(text):
        if text[i] in "([{":
            i = _closing(text, i)
        elif text[i] == "<" and re.search(r"\w$", text[:i]) and (close := _template_end(text, i)) is not None:
            i = close
        elif text[i] == ",":
            parts.append(text[start:i].strip())
            start = i + 1
        i += 1
    return [*parts, text[start:].strip()]


def _template_end(text: str, start: int) -> int | None:
    """Where template arguments that may open at `start` end; None: it is a comparison."""
    i, depth = start, 0
    while i < len(text) and text[i] not in ";{})]":
        if text[i] in "([":
            i = _closing(text, i)
        elif text[i] in "<>":
            if text[i : i + 2] in ("<<", "<=", ">=") or text[i - 1 : i + 1] == "->":
                return None
            depth += 1 if text[i] == "<" else -1
            if depth == 0:
                return i
        i += 1
    return None


def _closing(text: str, start: int) -> int:
    """Where the bracket that opens at `start` is closed."""
    depth = 0
    for match in re.compile(r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'|[()\[\]{}]').finditer(text, start):
        if match[0] in "([{":
            depth += 1
        elif match[0] in ")]}":
            depth -= 1
            if depth == 0:
                return match.start()
    raise LaunchSyntaxError(f"a bracket is never closed: {_excerpt(text, start)}")


def _opening(text: str, end: int) -> int:
    """Where the bracket that closes at `end` was opened."""
    closing, opening = text[end], {")": "(", "]": "[", ">": "<"}[text[end]]
    depth, i = 0, end
    while i >= 0:
        if closing == ">" and text[i] in ")]":
            i = _opening(text, i)  # a comparison in parentheses
        elif text[i] == closing:
            depth += 1
        elif text[i] == opening:
            depth -= 1
            if depth == 0:
                return i
        i -= 1
    raise LaunchSyntaxError(f"a bracket was never opened: {_excerpt(text, max(0, end - 40))}")


def _replaced(before: str, after: str) -> str:
    """`after` so that what follows it has the line that it had after `before`."""
    markers = list(MARKER.finditer(before))
    if not markers:
        return after + "\n" * (before.count("\n") - after.count("\n"))
    last = markers[-1]
    line = int(last[1]) + before.count("\n", last.end())
    return f"{after}\n# {line} {last[2]}\n"


def _excerpt(source: str, start: int) -> str:
    return " ".join(source[max(0, start - 40) : start + 120].split())
