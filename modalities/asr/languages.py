"""The languages that Whisper knows, by the code of their token."""

from __future__ import annotations

from polymux.core.errors import InvalidRequest

TABLE = """
en=english zh=chinese de=german es=spanish ru=russian ko=korean fr=french ja=japanese pt=portuguese tr=turkish
pl=polish ca=catalan nl=dutch ar=arabic sv=swedish it=italian id=indonesian hi=hindi fi=finnish vi=vietnamese
he=hebrew uk=ukrainian el=greek ms=malay cs=czech ro=romanian da=danish hu=hungarian ta=tamil no=norwegian th=thai
ur=urdu hr=croatian bg=bulgarian lt=lithuanian la=latin mi=maori ml=malayalam cy=welsh sk=slovak te=telugu
fa=persian lv=latvian bn=bengali sr=serbian az=azerbaijani sl=slovenian kn=kannada et=estonian mk=macedonian
br=breton eu=basque is=icelandic hy=armenian ne=nepali mn=mongolian bs=bosnian kk=kazakh sq=albanian sw=swahili
gl=galician mr=marathi pa=punjabi si=sinhala km=khmer sn=shona yo=yoruba so=somali af=afrikaans oc=occitan
ka=georgian be=belarusian tg=tajik sd=sindhi gu=gujarati am=amharic yi=yiddish lo=lao uz=uzbek fo=faroese
ht=haitian_creole ps=pashto tk=turkmen nn=nynorsk mt=maltese sa=sanskrit lb=luxembourgish my=myanmar bo=tibetan
tl=tagalog mg=malagasy as=assamese tt=tatar haw=hawaiian ln=lingala ha=hausa ba=bashkir jw=javanese su=sundanese
yue=cantonese
"""

NAMES = {code: name.replace("_", " ") for code, name in (entry.split("=") for entry in TABLE.split())}
"""Code to English name."""

CODES = {name: code for code, name in NAMES.items()}


def find_language(language: str, known: dict[str, int]) -> str:
    """The code of a code or an English name. Raises `InvalidRequest` unless it is among the `known` codes."""
    given = language.strip().lower()
    code = CODES.get(given, given)
    if code not in known:
        raise InvalidRequest(
            f"language {language[:40]!r} is not one that this model knows: {', '.join(sorted(known))}",
            param="language",
            code="invalid_language",
        )
    return code


def name_language(code: str) -> str:
    """The English name of a code; the code itself when it has none here."""
    return NAMES.get(code, code)
