"""The kinds of terminal tasks. Each draws its own names and contents; an answer that needs reading is in no instruction."""

from __future__ import annotations

import io
import json
import tarfile

from everlong.environments.tasks.terminal.draw import Draw
from everlong.environments.tasks.terminal.variant import Kind, Variant, file_is, gone, text, untouched

# Level 1: one command, every word of it in the instruction ----------------------------------------------------------


def write_word(draw: Draw) -> Variant:
    word, name = draw.words(2)
    return Variant(
        instruction=f"Write the word {word} to {name}.txt.",
        files={},
        commands=(f"echo {word} > {name}.txt",),
        checks=(file_is(f"{name}.txt", word),),
    )


def make_folder(draw: Draw) -> Variant:
    outer, inner = draw.words(2)
    return Variant(
        instruction=f"Make the folder {outer}/{inner}.",
        files={},
        commands=(f"mkdir -p {outer}/{inner}",),
        checks=(f"[ -d {outer}/{inner} ]",),
    )


def rename_file(draw: Draw) -> Variant:
    old, new = (f"{word}.txt" for word in draw.words(2))
    files = {old: text(draw.lines(1, 4))}
    return Variant(
        instruction=f"Rename {old} to {new}.",
        files=files,
        commands=(f"mv {old} {new}",),
        checks=(gone(old), file_is(new, files[old].decode())),
    )


# Level 2: one command -----------------------------------------------------------------------------------------------


def append_line(draw: Draw) -> Variant:
    word, name = draw.word(), f"{draw.word()}.txt"
    files = {name: text(draw.lines(2, 6))}
    return Variant(
        instruction=f"Append the line {word} to {name}.",
        files=files,
        commands=(f"echo {word} >> {name}",),
        checks=(file_is(name, files[name].decode() + word),),
    )


def copy_into_folder(draw: Draw) -> Variant:
    name, folder = f"{draw.word()}.txt", draw.word()
    files = {name: text(draw.lines(1, 4)), f"{folder}/{draw.word()}.txt": text(draw.lines(1, 2))}
    return Variant(
        instruction=f"Copy {name} into the folder {folder}.",
        files=files,
        commands=(f"cp {name} {folder}/",),
        checks=(*untouched(files, *files), file_is(f"{folder}/{name}", files[name].decode())),
    )


def count_lines(draw: Draw) -> Variant:
    source, target = (f"{word}.txt" for word in draw.words(2))
    lines = draw.lines(12, 90)
    return Variant(
        instruction=f"Count the lines of {source} into {target}.",
        files={source: text(lines)},
        commands=(f"wc -l < {source} > {target}",),
        checks=(file_is(target, str(len(lines))),),
    )


def count_matches(draw: Draw) -> Variant:
    source, target = (f"{word}.txt" for word in draw.words(2))
    word = draw.word()
    count = draw.number(5, 60)
    lines = draw.shuffled([word] * count + draw.lines(10, 40))
    return Variant(
        instruction=f"Count the lines of {source} with {word} into {target}.",
        files={source: text(lines)},
        commands=(f"grep -c {word} {source} > {target}",),
        checks=(file_is(target, str(sum(word in line for line in lines))),),
    )


def delete_extension(draw: Draw) -> Variant:
    folder, outside, *names = draw.words(8)
    ending = draw.random.choice(("log", "tmp", "bak", "old"))
    deleted = [f"{folder}/{name}.{ending}" for name in names[:3]]
    kept = [f"{outside}.{ending}", *(f"{folder}/{name}.txt" for name in names[3:])]
    files = {path: text(draw.lines(1, 2)) for path in (*deleted, *kept)}
    return Variant(
        instruction=f"Delete the .{ending} files in {folder}.",
        files=files,
        commands=(f"rm {folder}/*.{ending}",),
        checks=(*(gone(path) for path in deleted), *untouched(files, *kept)),
    )


def csv_column(draw: Draw) -> Variant:
    source, target = draw.words(2)
    column = draw.number(1, 3)
    rows = [draw.lines(3, 3) for _ in range(draw.number(3, 6))]
    return Variant(
        instruction=f"Write column {column} of {source}.csv to {target}.txt.",
        files={f"{source}.csv": text([",".join(row) for row in rows])},
        commands=(f"cut -d, -f{column} {source}.csv > {target}.txt",),
        checks=(file_is(f"{target}.txt", "\n".join(row[column - 1] for row in rows)),),
    )


def sum_numbers(draw: Draw) -> Variant:
    source, target = (f"{word}.txt" for word in draw.words(2))
    numbers = [draw.number(1, 99) for _ in range(draw.number(3, 8))]
    return Variant(
        instruction=f"Write the sum of {source} to {target}.",
        files={source: text([str(number) for number in numbers])},
        commands=(f"echo $(($(paste -sd+ {source}))) > {target}",),
        checks=(file_is(target, str(sum(numbers))),),
    )


def largest_number(draw: Draw) -> Variant:
    source, target = (f"{word}.txt" for word in draw.words(2))
    numbers = [draw.number(1, 999) for _ in range(draw.number(4, 9))]
    return Variant(
        instruction=f"Write the largest number of {source} to {target}.",
        files={source: text([str(number) for number in numbers])},
        commands=(f"sort -n {source} | tail -n 1 > {target}",),
        checks=(file_is(target, str(max(numbers))),),
    )


def sort_unique(draw: Draw) -> Variant:
    source, target = (f"{word}.txt" for word in draw.words(2))
    some = draw.lines(3, 6)
    lines = draw.shuffled(some + some[:3])
    return Variant(
        instruction=f"Sort {source} without repeats into {target}.",
        files={source: text(lines)},
        commands=(f"sort -u {source} > {target}",),
        checks=(file_is(target, "\n".join(sorted(set(lines)))),),
    )


def replace_word(draw: Draw) -> Variant:
    name, old, new = f"{draw.word()}.txt", *draw.words(2)
    lines = draw.shuffled([old] * draw.number(2, 3) + draw.lines(2, 5))
    return Variant(
        instruction=f"Replace {old} by {new} in {name}.",
        files={name: text(lines)},
        commands=(f"sed -i s/{old}/{new}/g {name}",),
        checks=(file_is(name, "\n".join(line.replace(old, new) for line in lines)),),
    )


def first_lines(draw: Draw) -> Variant:
    source, target = (f"{word}.txt" for word in draw.words(2))
    count, lines = draw.number(2, 5), draw.lines(7, 12)
    return Variant(
        instruction=f"Write the first {count} lines of {source} to {target}.",
        files={source: text(lines)},
        commands=(f"head -n {count} {source} > {target}",),
        checks=(file_is(target, "\n".join(lines[:count])),),
    )


def make_executable(draw: Draw) -> Variant:
    folder, *names = draw.words(3)
    path, other = (f"{folder}/{name}.sh" for name in names)
    files = {script: text(["#!/bin/bash", f"echo {draw.word()}"]) for script in (path, other)}
    return Variant(
        instruction=f"Make {path} executable.",
        files=files,
        commands=(f"chmod +x {path}",),
        checks=(*untouched(files, path, other), f"[ -x {path} ]", f"[ ! -x {other} ]"),
    )


# Level 3: the output of one command decides the next ----------------------------------------------------------------


def find_file(draw: Draw) -> Variant:
    folder, target, word, *names = draw.words(7)
    paths = [f"{folder}/{name}.txt" for name in names]
    files = {path: text(draw.lines(2, 4)) for path in paths}
    files[paths[0]] += text([word])
    return Variant(
        instruction=f"Write the path of the file in {folder} with {word} to {target}.txt.",
        files=files,
        commands=(f"grep -l {word} {folder}/*", f"echo {paths[0]} > {target}.txt"),
        checks=(file_is(f"{target}.txt", paths[0]),),
    )


def follow_name(draw: Draw) -> Variant:
    start, target, answer, *names = draw.words(6)
    paths = [f"{name}.txt" for name in names]
    files = {path: text(draw.words(1)) for path in paths}
    files |= {f"{start}.txt": text(paths[:1]), paths[0]: text([answer])}
    return Variant(
        instruction=f"{start}.txt names a file. Write its word to {target}.txt.",
        files=files,
        commands=(f"cat {start}.txt", f"cat {paths[0]}", f"echo {answer} > {target}.txt"),
        checks=(file_is(f"{target}.txt", answer),),
    )


def json_key(draw: Draw) -> Variant:
    source, target, key, answer = draw.words(4)
    pairs = draw.shuffled([key, *draw.words(2)])
    values = {name: answer if name == key else draw.word() for name in pairs}
    return Variant(
        instruction=f"Write the value of {key} in {source}.json to {target}.txt.",
        files={f"{source}.json": text([json.dumps(values)])},
        commands=(f"cat {source}.json", f"echo {answer} > {target}.txt"),
        checks=(file_is(f"{target}.txt", answer),),
    )


# Held out: never trained --------------------------------------------------------------------------------------------


def join_files(draw: Draw) -> Variant:
    first, second, target = (f"{word}.txt" for word in draw.words(3))
    files = {name: text(draw.lines(2, 4)) for name in (first, second)}
    return Variant(
        instruction=f"Join {first} and {second} into {target}.",
        files=files,
        commands=(f"cat {first} {second} > {target}",),
        checks=(*untouched(files, *files), file_is(target, (files[first] + files[second]).decode())),
    )


def last_lines(draw: Draw) -> Variant:
    source, target = (f"{word}.txt" for word in draw.words(2))
    count, lines = draw.number(2, 5), draw.lines(7, 12)
    return Variant(
        instruction=f"Write the last {count} lines of {source} to {target}.",
        files={source: text(lines)},
        commands=(f"tail -n {count} {source} > {target}",),
        checks=(file_is(target, "\n".join(lines[-count:])),),
    )


def unpack_archive(draw: Draw) -> Variant:
    archive, folder, present, *names = draw.words(5)
    contents = {f"{name}.txt": text(draw.lines(1, 3)) for name in names}
    files = {f"{archive}.tar": _tar(contents), f"{folder}/{present}.txt": text(draw.lines(1, 2))}
    return Variant(
        instruction=f"Unpack {archive}.tar into {folder}.",
        files=files,
        commands=(f"tar xf {archive}.tar -C {folder}",),
        checks=tuple(file_is(f"{folder}/{name}", content.decode()) for name, content in contents.items()),
    )


def _tar(contents: dict[str, bytes]) -> bytes:
    """An archive whose bytes depend on names and contents only."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name, content in contents.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return raw.getvalue()


KINDS = (
    Kind("write-word", write_word, level=1),
    Kind("make-folder", make_folder, level=1),
    Kind("rename-file", rename_file, level=1),
    Kind("append-line", append_line, level=2),
    Kind("copy-into-folder", copy_into_folder, level=2),
    Kind("count-lines", count_lines, level=2),
    Kind("count-matches", count_matches, level=2),
    Kind("delete-extension", delete_extension, level=2),
    Kind("csv-column", csv_column, level=2),
    Kind("sum-numbers", sum_numbers, level=2),
    Kind("largest-number", largest_number, level=2),
    Kind("sort-unique", sort_unique, level=2),
    Kind("replace-word", replace_word, level=2),
    Kind("first-lines", first_lines, level=2),
    Kind("make-executable", make_executable, level=2),
    Kind("find-file", find_file, level=3),
    Kind("follow-name", follow_name, level=3),
    Kind("json-key", json_key, level=3),
    Kind("join-files", join_files, level=2, held_out=True),
    Kind("last-lines", last_lines, level=2, held_out=True),
    Kind("unpack-archive", unpack_archive, level=2, held_out=True),
)
