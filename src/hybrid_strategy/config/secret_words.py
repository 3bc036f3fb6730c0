"""What a secret looks like: by the word that stands before it, or by itself. Knows nothing of configurations.

A word is the key of a mapping, the option before an argument (`--api-key x`), the name in a header or beside a `value`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_WHOSE = (
    "api|access|o?auth|bearer|hf|hub|hugging_?face|github|gitlab|wandb|session|refresh|security|service|personal|secret"
    "|bot|slack|discord|telegram|sas|jwt|comet|neptune|clearml|openai|anthropic|aws|azure|gcp|google|pypi|npm|docker|registry"
)
_NAME = re.compile(
    r"(?:.*_)?(?:passwords?|passwd|pwd|passphrase|passcode|secrets?|authorization|apikeys?"
    rf"|(?:api|access|secret|private|auth|account|client|signing|encryption|ssh|license)_keys?|(?:{_WHOSE})_tokens?)"
    r"|token|(?:.*_)?(?:db|user|smtp|ftp|proxy|http|database)_pass|pass"
)
"""A key of a configuration that holds a secret; `pad_token` or `text_key` do not."""

_PERHAPS = re.compile(r"(?:.*_)?(?:key|token|credential)s?|auth")
"""A key that holds one where its value looks like nothing else."""
_COUNTED = ("token", "tokens", "keys", "pass")
"""Words whose numbers are no secrets."""
_ABOUT = re.compile(r"(?:.*_)?(?:user|username|login|e?mail|host|url|uri|id|name|kind|type|path|file|filename|variable|scheme)")
"""What else is said of a secret, below its name: `credentials: {user: me}`."""

_WORD = re.compile(r"[a-z0-9](?=[A-Z])")
_RUN = re.compile(r"[A-Za-z0-9]+")
_CHANGE = re.compile(r"(?<=[A-Za-z])(?=\d)|(?<=\d)(?=[A-Za-z])")
_OPTION = re.compile(r"--?([A-Za-z][\w-]*)")
_PATH = re.compile(r"(?:~|\.{0,2})/[^\s:]*\.[a-z]{2,5}")

_SENTENCE = "an?|the|what|which|who|where|when|why|how|is|are|to|for|of|in|on|as|and|or|option|flag|argument|must|should"
"""Words that go on after `--password`, `Password:`; never a secret where more words come."""
_BEGINS = rf"(?!(?i:{_SENTENCE})\s|\.[*+]|%[sd(]|\?(?!\w))[^\s\"'$`{{*<(\\\[]"
"""Of a value; what reads a secret from elsewhere, e.g. `TOKEN=$(cat file)`, is none, nor is a pattern, e.g. of file names:
`token={tokens}`, or the next word of a sentence."""
_ASSIGNED = re.compile(rf"([\w-]+)=[\"']?{_BEGINS}")
_SAID = (
    _ASSIGNED,  # of a line of a script, a URL, a list of arguments
    re.compile(rf"(?<!\S)--?([A-Za-z][\w-]*)\s+[\"']?(?!-){_BEGINS}"),  # an option
    re.compile(rf"[\"']([\w-]+)[\"']\s*:\s*[\"']?{_BEGINS}"),  # JSON
)
_HEADER = re.compile(rf"(?<![\w-])([\w-]+):\s+[\"']?{_BEGINS}")
_PROSE = ("token", "secret", "secrets", "pass")
"""What also stands before a colon in sentences."""

_LABEL = re.compile(r"(?i)(?<![\w-])token=[a-z]{1,8}(?![^\s/,;&\])}])")
"""A short word is no token: `token=bpe` names a run, a tag, a folder."""
_QUERY = re.compile(r"[?&](?:(?:sig|signature)=[\w%+/.~-]{8,}|(?:key|code)=([\w%+/.~-]{8,}))")
"""Of a URL. What stands for a key there may be the name of something."""
_LONG = re.compile(r"[A-Za-z0-9]{20,}")

_OF_CONTENT = re.compile(r"(?:.*_)?(?:data|dataset|cache|checkpoint|state_dict|hash|sort|partition|commit|content|row)_keys?")
_HASH = re.compile(r"(?:[a-z]\w*:)?[0-9a-f]+")
"""What names a content: of files, caches, commits."""

_USER = re.compile(r"(?i)https?://(?=[a-z._+-]{1,20}\d{0,4}@)[a-z]+(?:[._+-][a-z]+)*\d{0,4}@")
"""The plain name of a user before a host."""
_IN_TEXT = re.compile(
    r"[a-z][\w+.-]*://[^\s/@:?#]*:(?!<>@)[^\s/@?#]+@"  # user and password before a host
    r"|https?://(?!<>@)[^\s/@:?#]+@"  # a token before a host
    r"|\b[Bb]earer\s+(?![a-z]+\s)[\w.~+/=-]{8,}"
    r"|\b(?:hf_[A-Za-z0-9]{20,}|gh[opsur]_[A-Za-z0-9]{30,}|github_pat_\w{20,}|glpat-[\w-]{16,}|AKIA[0-9A-Z]{16})\b"
    r"|\b(?:xox[abeprs]-[\w-]{10,}|AIza[\w-]{35}|sk-(?=[\w-]*\d)[\w-]{20,}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]{5,})"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----"
    r"|hooks\.slack\.com/services/\w+/\w+/\w+"
    r"|\b(?:curl|wget)\s(?:.*\s)?(?:-u|--user)[\s=]+[\"']?[^\s:$\"']+:[^\s$\"']+"
    r"|\blogin\s+(?:-\S+\s+)*[A-Za-z0-9]{32,}\b"
)


def _plain(name: str) -> str:
    return _WORD.sub(r"\g<0>_", name).replace("-", "_").strip("_").lower()


def is_secret_name(name: str) -> bool:
    """Does a key of this name hold a secret?

    >>> [name for name in ("api_key", "apiKey", "HF_TOKEN", "token", "pad_token", "key", "max_tokens") if is_secret_name(name)]
    ['api_key', 'apiKey', 'HF_TOKEN', 'token']
    """
    return _NAME.fullmatch(_plain(name)) is not None


def is_written_down(name: str, text: str) -> bool:
    """Is a secret in this text? `<>` stands for those that it names.

    >>> [is_written_down(*each) for each in [("password", "x"), ("url", "http://u:pw@host"), ("url", "http://me@host")]]
    [True, True, False]
    >>> [is_written_down("arguments", each) for each in ("--api-key x1", "--tokens 3", "X-Api-Key: x1", "login --user me")]
    [True, False, True, False]
    >>> [is_written_down("text", each) for each in ("Password: what is it?", "Password: x1", "h?key=train_set", "token=bpe")]
    [False, True, False, False]
    """
    whole, text = text, _LABEL.sub("", text)
    said = [found for each in _SAID for found in each.findall(text) if found.lower() != "pass"]
    said += [found for found in _HEADER.findall(text) if found.lower() not in _PROSE]
    return (
        _is_whole(name, whole)
        or _is_in_query(text)
        or bool(_IN_TEXT.search(_USER.sub("", text)))
        or any(map(is_secret_name, said))
    )


def _is_whole(name: str, text: str) -> bool:
    if not text or (text[0] in "<[" and text[-1] in ">]") or _PATH.fullmatch(text):
        return False
    if _OF_CONTENT.fullmatch(_plain(name)) and _HASH.fullmatch(text):
        return False
    return is_secret_name(name) or bool(_PERHAPS.fullmatch(_plain(name)) and _is_random(text))


def _is_in_query(text: str) -> bool:
    return any(not each or _is_random(each) or bool(_LONG.search(each)) for each in _QUERY.findall(text))


def _is_random(text: str) -> bool:
    """Nothing that a person would have chosen for a name: letters and digits change places more often than once a word.

    >>> [_is_random(each) for each in ("cam0_view1_depth2", "llama3_8b-v2", "0f3c9a1b77d2e4c8", "observation.image")]
    [False, False, True, False]
    """
    return sum(max(0, len(_CHANGE.findall(run)) - 1) for run in _RUN.findall(text)) >= 3


def is_number_of_secret(name: str) -> bool:
    """Is a number under this name a secret, and not a count?"""
    return is_secret_name(name) and not _plain(name).endswith(_COUNTED)


def names_assigned(text: str) -> list[str]:
    """The names that a line of a script, a URL or an argument gives a value."""
    return [each.strip("-") for each in _ASSIGNED.findall(text)]


def parts_of(value: Mapping[Any, Any] | Sequence[Any], word: str, inner: bool = False) -> Iterator[tuple[Any, Any, str]]:
    """Key or index, part, and the word that stands before the part.

    Args:
        word: that stands before the whole.
        inner: is the whole a part of a list? Two texts are then a name and its value.
    """
    if isinstance(value, Mapping):
        beside = next(
            (each for each in (value.get("name"), value.get("key")) if isinstance(each, str) and is_secret_name(each)), ""
        )
        for key, each in value.items():
            inherited = (
                is_secret_name(word) and not isinstance(each, (bool, int, float)) and not _ABOUT.fullmatch(_plain(str(key)))
            )
            yield key, each, beside if beside and key == "value" else word if inherited else str(key)
        return
    before = ""
    for index, each in enumerate(value):
        named = is_secret_name(before) and (_OPTION.fullmatch(before) or (inner and len(value) == 2))
        yield index, each, before.strip("-") if named and not str(each).startswith("-") else word
        before = each.strip().rstrip(":") if isinstance(each, str) else ""
