"""Which Latin encoding gives the accented letters of one language?

The general detector knows letters by their frequency; on a page or less it takes French for Baltic
(cp1257) and Portuguese for Central European (cp1250). What tells them apart is which accented
letters a language has at all: read in a wrong encoding, a text soon shows one that it has not.
"""

from __future__ import annotations

from collections import Counter

# By encoding, the commoner first: of two that fit alike, the first one wins.
_CENTRAL = {
    "Polish": "ąćęłńóśźż",
    "Czech": "áčďéěíňóřšťúůýž",
    "Slovak": "áäčďéíĺľňóôŕšťúýž",
    "Hungarian": "áéíóöőúüű",
    "Croatian, Slovene": "čćđšž",
    "Romanian": "ăâîşţ",
}
_ALPHABETS = {
    "cp1252": {
        "French": "àâæçéèêëîïôœùûüÿ",
        "Spanish": "áéíóúüñ¿¡ºª",
        "Portuguese": "áâãàçéêíóôõúüºª",
        "German": "äöüß",
        "Italian": "àèéìòùî",
        "Swedish, Finnish": "åäöé",
        "Danish, Norwegian": "æøåéóò",
        "Dutch": "ëïéèöüó",
        "Icelandic": "áéíóúýþæöð",
        "Catalan": "àçèéíïóòúü·",
    },
    "cp1250": _CENTRAL,
    "iso8859_2": _CENTRAL,
    "cp1254": {"Turkish": "çğıöşüâîûİ"},
    "cp1257": {
        "Lithuanian": "ąčęėįšųūž",
        "Latvian": "āčēģīķļņšūž",
        "Estonian": "äõöüšž",
    },
}
_ANYWHERE = set("‘’‚“”„–—…«»‹›©°§€\u00a0")
LEAST_SHARE = 0.97  # a foreign name or two are no other language
ENCODINGS = tuple(_ALPHABETS)


def best_fit(sample: bytes) -> str | None:
    """The encoding in which nearly all accented letters of a sample belong to one language."""
    best, best_share = None, LEAST_SHARE
    for encoding, languages in _ALPHABETS.items():
        try:
            text = sample.decode(encoding)
        except UnicodeDecodeError:
            continue
        found = Counter(character for character in text if character > "\x7f")
        for letters in languages.values():
            known = {*letters, *letters.upper(), *_ANYWHERE}
            fitting = sum(count for character, count in found.items() if character in known)
            share = fitting / max(found.total(), 1)
            if share > best_share:
                best, best_share = encoding, share
    return best
