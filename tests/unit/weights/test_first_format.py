"""Stores that the first format was written to are read as before, and go on in the new one."""

import base64

import numpy as np
import pytest

from everlong.contracts.errors import StoreError
from everlong.storage import ObstoreStore, open_store
from everlong.weights import RawTensor, WeightPublisher, WeightReader, WeightSet, fingerprint
from everlong.weights.first_format import apply_delta, apply_steps
from everlong.weights.manifest import FORMAT, Codec, load_manifest, version_key
from everlong.weights.zstd import compress, decompress

OBJECTS = {
    "weights/shards/12370d19846c74935d11b0312bbcbb0ac0faf8588dc6101e0387780a9dd46df4": (
        r"D77#BAP7MK000000Dyo$zbLgY{UCTP0szzl00#~g93v_*I6p>BR9j+caCd%%jFXz7sIRuY#LLpz;OFl3`~wOR7#}7rG&@2`P*+}M"
        r"Y;$^nh>w<?JOKa=2|xh"
    ),
    "weights/shards/e37630fbf6d053c2fdbb3c1f9c51faa22810fe0b97c640d7df0d31708906c2e5": (
        r"D77#BAS1m10C)oc0RRIH761SM0snwRJpuq=z%sxB"
    ),
    "weights/shards/f42bb2b33ff3a4a94778338bc69760feeb55c08b1db91f80e75b369befc7488e": (
        r"D77#BAU=Hn07wA=0RaJk0VKQu06KvY"
    ),
    "weights/versions/00000000": (
        r"dm?saa&u{KZX!A`EFxlIb7fz4WpZ<AZ*C$wZgp&IEFx}oZC_+%Y;<9BB04ZEB4%lBXJvA5a%paKB03^tGd5ynGGSvfHe)w3V>4l6"
        r"H!@;5V>mT5GdMRfI5aaNEFx}oZC`d_Y;|RGB04rQEFx}oZC_((VQyz-WFk5?GAtr<Xkl_>b0Ruhdm?CIb7&$uA~7;EH!x%|IXE;n"
        r"V>dK8Gc{x}F=8+?F*0IeV`5@3VPi06VP-frI5=cuHZd?UWiT^1H#ayiVL4=EG&W>rG$Je_b7^{IUt)Q5Wpg4rIW>J<EFyGeZgX#P"
        r"b0Ruhdm?UOZDk@lB4#2iB4l)VaAhJoB4%uFVRSPxA}k_vXkl<=B05_#T`VGFZ)9a-B03^wb!==REFxoQWn*h|b!{R#B4jZ#Fl9J5"
        r"V=`qhVKgyeV>U5kH#0IcVqrC9Wi)1HVInLdZgp*6V`yP+XJup}Ix;LGb7*05WFk5+EFy1aW^-k9B04ZEB6DeaWnW@>bY*iQIx#nW"
        r"EPEnuVQpn1IwE%>EFxrdd2nSSIwE3bY;R$7F*YJBB6DbAaAhJoTQ)FVEFxoXWMyL_IwEFuY-}PdB4cP}V{3DDZ6Z1%W;J4BVr6Aw"
        r"VPY{gI5sdcVKZblIWae5FgY_}F=b*hA}k_qb!}f`Xkl(=Wn>~cHZUwAb7*05WFk5+EFy1aW^-k9B04cQEFyDhdSzc?d30rSB04uX"
        r"eO)XfW^!+OWo{xmZgp&IEFxxaa&2LBB04dB"
    ),
    "weights/versions/00000001": (
        r"dm?saa&u{KZX!A{EFxlIb7fz4WpZ<AZ*C$wFf1Z&b!}f{Wo&d|b0Ru1EFxxUZf9k3aB^vGbRs$;VmD)AWnwX5VP-UCG&VJ1I5Iak"
        r"GB#s0H#B21G&VOfA}k_qb!}gEVQh6}b0Ru6GAtr)b!}f`Xkl(=Wn>~cGb|!=Xkl_>b0Ruhdm?CIb7&$uB4sl-HZw40VrDjEFf}t{"
        r"GG=6AVl!hgW;tUuF=k<5GBP+ZFlJ>iVmUWsHZ(9~H)LioWHT{0FgQ6dHe)hnH6kn`b7^{IUt)Q5Wpg4rGctW$EFyGeZgX#Pb0Ruh"
        r"dm?UOZDk@lB4#2iB4l)VaAhJoB4%uFVRSPxA}k_vXkl<=B05_#T`VGFZ)9a-B03^-VQpn1EFxoQWn*h|b!{R#B4jZ#Fl9J5V=`qh"
        r"VKgyeV>U5kH#0IcVqrC9Wi)1HVInLdZgp*6V`yP+XJup}Ixs9Eb7*05WFk5(F)Si)W@d9`bRs%1EFyDhdSzc?d30rSB04aAEPEnu"
        r"VQpn1IwE%>EFxrdd2nSSIwE3bY;R$7F*YJBB6DbAaAhJoTQ)FVEFxoXWMyL_IwE9cY;<8FEFxoQWn*h|b!{R#A~j-RIWaLfVL3N6"
        r"F*PzcWMX1vFfwB?W;rrrIAmpFG9oM@Zgp*6V`yP+XJup}Ix{RHb7*05WFk5+EFy1aW^-k9B04ZEB6DeaWnW@>bY*iQIx{kTT`VGI"
        r"a&LNNZX!Bvb!==bB4%%LZDDjGIx&3"
    ),
    "weights/versions/00000002": (
        r"dm?saa&u{KZX!A|EFxlIb7fz4WpZ<AZ*C$wF)Si(b!}f{Wo&d|b0Ru2EFxxUZf9k3aB^vGbRs$;F*r3hWMw#GIWS^2Fk@pkF=jVq"
        r"V=`hgFgRs7W@BVGA}k_qb!}gEVQh6}b0Ru6GAtr)b!}f`Xkl(=Wn>~cHZUwAb7*05WOE`qTYDmCVRL9AIwEE?GGbyfVly*lW;0<l"
        r"VL3E6H#jphIAUWqIX5;iW@Tk!H8o=}IASqmVmUEpI51^5HDWV1IbvmIV>dK7IAtO%B6DeaWnW@>bY*iQIx;kUT`VGWWo~nCa&sa&"
        r"TYDmIVQpn1IwEEwEFxrdd2nSSIwEFlZ((#ZG9oM@b7*03Wg<FTGF>bpV{c?-V<I{tb75^|A}k_fXk}w-b9HSZIwE8-GB9O0H)Aqo"
        r"Fkv(?VPiHiV>dH0G-6>jWo0yGW?>>MB5rkUUt?%tZf9j=B04ZEB6DbAa%3VpEio)2Z)Rq5WppAsFf1Z-X?kT}VtI6Bb0Ru0eJpz-"
        r"ZeeX@B03^>A}k_gba`-PB03^sW^8X^bTKv}EFyDgVQ^(4I$Jg{T`VGFZ)9a-B03^-bY*aJA}k_fXk}w-b9HSZIwE9dWn(fjG-P8n"
        r"FfuYTIA&vEGB;v3V=^>3V>U1}HDn?zB5rkUUt?%tZf9j=B04rOEFyDgVRB?5Ixs9EZ)Rq5WppAsFf1Z-X?kT}VtI6Bb0Ru2G<{tx"
        r"B4%=LdSz}RI&O7rY%C&XZ*py6bRs%2eE"
    ),
}
"""Three versions as the first format had them: whole, gaps with a far value, and a step for every value. Base 85."""


def versions() -> list[WeightSet]:
    first = (0x3C00 + 7 * np.arange(60) % 256).astype(np.uint16)
    second = first.copy()
    second[[3, 17, 40]] += np.array([1, 65535, 300], np.uint16)
    third = (second + 1).astype(np.uint16)
    third[5] ^= 0x8000
    still = RawTensor("float32", (2,), np.array([0x3F800000, 0xBF800000], np.uint32))
    return [
        WeightSet(number, {"w": RawTensor("bfloat16", (60,), bits), "f": still})
        for number, bits in enumerate([first, second, third])
    ]


@pytest.fixture
def store() -> ObstoreStore:
    store = open_store("memory://")
    for key, text in OBJECTS.items():
        store.put(key, base64.b85decode(text))
    return store


def payload(store: ObstoreStore, version: int) -> bytes:
    manifest = load_manifest(store, version)
    assert manifest is not None
    entry = next(entry for entry in manifest.tensors if entry.name == "w")
    return store.get(manifest.shards[entry.shard].key)[entry.offset : entry.offset + entry.size_bytes]


def test_every_version_of_the_first_format_is_read(store: ObstoreStore) -> None:
    codecs = [entry.codec for number in range(3) for entry in load_manifest(store, number).tensors]
    assert codecs == [Codec.FULL, Codec.FULL, Codec.SAME, Codec.DELTA, Codec.SAME, Codec.STEPS]
    for weights in versions():
        assert fingerprint(WeightReader(store).read(weights.version)) == fingerprint(weights)


def test_a_run_goes_on_in_the_new_format(store: ObstoreStore) -> None:
    last = versions()[-1]
    bits = last.tensors["w"].bits.copy()
    bits[7] += 1
    new = WeightSet(3, last.tensors | {"w": RawTensor("bfloat16", (60,), bits)})
    WeightPublisher(store, 10).publish(new, last)
    manifest = load_manifest(store, 3)
    assert (manifest.base_version, manifest.format) == (2, FORMAT)
    assert fingerprint(WeightReader(store).read(3)) == fingerprint(new)


def test_a_later_format_is_refused_by_its_number(store: ObstoreStore) -> None:
    later = b'{"version": 0, "format": 3, "anything": []}'
    for raw in (later, compress(later)):
        store.put(version_key(0), raw)
        with pytest.raises(StoreError, match="says version 0, format 3; expected version 0, format 1 or 2"):
            WeightReader(store).read(0)


@pytest.mark.parametrize(("version", "apply"), [(1, apply_delta), (2, apply_steps)], ids=["gaps", "steps"])
def test_damage_is_a_value_error_or_another_checksum(store: ObstoreStore, version: int, apply) -> None:
    old, new = (versions()[number].tensors["w"] for number in (version - 1, version))
    coded = payload(store, version)
    raw = decompress(coded, 1000)
    assert apply(old, coded).checksum() == new.checksum()
    for at in range(len(raw)):
        for damaged in (
            compress(raw[:at]),
            compress(raw[:at] + bytes([raw[at] ^ 0x81]) + raw[at + 1 :]),
            coded[:at][:-1],
        ):
            try:
                applied = apply(old, damaged)
            except ValueError:
                continue
            assert applied.checksum() != new.checksum()


def test_a_delta_for_a_larger_tensor_is_a_value_error(store: ObstoreStore) -> None:
    small = RawTensor("bfloat16", (5,), np.zeros(5, np.uint16))
    with pytest.raises(ValueError):
        apply_delta(small, payload(store, 1))
    with pytest.raises(ValueError):
        apply_steps(small, payload(store, 2))
