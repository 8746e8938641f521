"""Commands of a shell script, compared with bash: it runs each script with a program that prints its arguments."""

import os
import subprocess

import pytest

from megalin.errors import ConfigError
from megalin.interop.configs.shell import read_script

ARRAYS = """
#!/bin/bash
# a comment with 'a quote
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8
NUM_NODES=4   # another
WORLD_SIZE=$(($GPUS_PER_NODE*$NUM_NODES))
DATA_PATH="corpus/my text_document"
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes ${NUM_NODES}
)
MODEL_ARGS=(
    --num-layers $((WORLD_SIZE / 2 + 8)) \\
    --hidden-size 12288 # inside
    # --swiglu
    --split '949,50,1'
    "--tokenizer-type NullTokenizer"
    --step-batch-size-schedule "0:16 2.4B:320"
)
MODEL_ARGS+=("--data-path" "$DATA_PATH")
show ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py \\
    ${MODEL_ARGS[@]} \\
    "${MODEL_ARGS[@]}" --last "$WORLD_SIZE"x'$WORLD_SIZE'
"""
OPTIONS = """
NAME=${JOB:-"train it"}; TP=2
SAVE="runs/${NAME}"
options=" \\
    --tensor-model-parallel-size ${TP} \\
    --save ${SAVE}"
[ -z "$UNSET" ] && options="$options --bf16"
[[ "$TP" == "1" || $TP -ge 4 ]] && options+=" --wrong"
show pretrain_gpt.py ${options} "\\$5" \\"x\\" a\\ b "" ${EMPTY} ${TP:+no} 2>&1 > /dev/stderr | cat
"""
BRANCHES = """
MODEL="8B"
if [ "${MODEL}" == "800M" ]; then
    LAYERS=24
elif [[ $MODEL == 8* ]] && [[ -n "$MODEL" ]]; then
    LAYERS=32
    if [[ ! $LAYERS -gt 40 ]]; then HEADS=16; else HEADS=64; fi
else
    LAYERS=1
fi
case "${MODEL}" in
    "800M" | tiny)
        GROUPS_OF=1
        ;;
    8?) GROUPS_OF=8 ;;
    *)
        GROUPS_OF=2
        exit 1
        ;;
esac
for i in 1 2; do echo $i > /dev/null; done
cat > /dev/null <<EOF
LAYERS=99 --not-a-flag
EOF
start() {
    show pretrain_gpt.py --num-layers $LAYERS --heads $HEADS --groups=$GROUPS_OF
}
start
"""


def _words_by_bash(script, tmp_path):
    program = tmp_path / "show"
    program.write_text('#!/bin/bash\nprintf "%s\\0" "$@" > "$SHOWN"\n')
    program.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SHOWN": str(tmp_path / "shown")}
    subprocess.run(["bash", "-c", script], env=environment, check=True, capture_output=True)
    return (tmp_path / "shown").read_text().split("\0")[:-1]


@pytest.mark.parametrize("script", [ARRAYS, OPTIONS, BRANCHES], ids=["arrays", "options", "branches"])
def test_words_are_those_of_bash(script, tmp_path):
    script = script.replace("${TP:+no} ", "").replace("${EMPTY} ", "")
    (words,) = (command for command in read_script(script, {}).commands if command[0] == "show")
    assert words[1:] == _words_by_bash(script, tmp_path)


def test_given_variables_and_arguments_are_used_and_others_stay():
    script = (
        "CHECKPOINT=$1\nDATA=$2\nrun --save $CHECKPOINT --data ${DATA} --home $HOME --name ${JOB:-none} --here $PWD/x"
    )
    (words,) = read_script(script, {"1": "out", "JOB": "mine"}).commands
    assert words == ["run", "--save", "out", "--data", "${2}", "--home", "${HOME}", "--name", "mine", "--here", "./x"]


def test_parts_that_only_a_shell_can_evaluate_are_skipped_and_reported():
    script = (
        "if grep -q x file; then\n  A=1\nelse\n  A=2\nfi\n"
        "while read line; do\n  B=1\ndone\n. ./settings.sh\nrun --a ${A} --b $B --c $(nproc)"
    )
    commands, notes = read_script(script, {})
    assert commands[-1] == ["run", "--a", "${A}", "--b", "${B}", "--c", "$(nproc)"]
    assert notes == [
        (1, "a condition that only a shell can evaluate: its body is skipped"),
        (6, "a loop: its body is skipped"),
        (9, ". ./settings.sh is not read; give its variables with --variable"),
    ]


def test_nothing_of_a_script_is_run(tmp_path):
    target = tmp_path / "made"
    read_script(f"touch {target}\nX=$(touch {target})\n`touch {target}`\nif touch {target}; then Y=1; fi", {})
    assert not target.exists()


@pytest.mark.parametrize(
    ("script", "message"), [("run 'open", "line 1: a quote ' is"), ("A=(\n1\n", "line 3: .*'\\)'")]
)
def test_incomplete_script_is_refused(script, message):
    with pytest.raises(ConfigError, match=message):
        read_script(script, {})


DOUBLED = "A=" + "x" * 20 + "\n" + ("A=" + "$A" * 12 + "\n") * 12 + "python pretrain_gpt.py --save $A\n"
HOSTILE = {
    "text that grows twelvefold twelve times": (DOUBLED, "variables expand to more than 4,194,304 characters"),
    "arrays that grow": ("A=(x)\n" + "A=(${A[@]} ${A[@]} ${A[@]})\n" * 20, "variables expand to more than"),
    "text that is appended to itself": ("A=x\n" + "A+=$A\n" * 40, "variables expand to more than"),
    "nested defaults": ("A=" + "${B:-" * 20_000, "variables expand to more than"),
    "few nested defaults": ("A=" + "${B:-" * 500 + "x" + "}" * 500, "nested more than 100 deep"),
    "endless eval": ("A='eval $A'\neval $A\n", "nested more than 100 deep"),
    "eval that doubles": ('A=\'eval "$A; $A"\'\neval "$A"\n', "nested more than 100 deep"),
    "negations": ("! " * 3000 + "show\n", "nested more than 100 deep"),
    "negations of a test": ("if [ " + "! " * 3000 + "x ]; then A=1; fi\n", "nested more than 100 deep"),
    "a long script": ("#" * (1 << 20) + "\n", "more than 1,048,576 characters"),
}


@pytest.mark.parametrize("name", list(HOSTILE))
def test_scripts_that_grow_without_end_are_refused(name):
    text, message = HOSTILE[name]
    with pytest.raises(ConfigError, match=f"the script cannot be read: {message}.*; give the training command alone"):
        read_script(text, {})


def test_numbers_and_arithmetic_beyond_any_size_are_left_as_text():
    digits = "9" * 5000
    script = f"""
    A=(a b); B=$((1{"+1" * 2000})); C=$(({"(" * 90}1{")" * 90})); D=$(({digits}*{digits}))
    if [ --5 -eq 3 ]; then E=1; fi; if [ ² -lt {digits} ]; then F=1; fi
    show "${{A[{digits}]}}" "${{#B}}" "$B" $C {digits}
    """
    ((show, first, *_, last),) = read_script(script, {}).commands
    assert (show, first, last) == ("show", "", digits)


def test_long_values_and_many_appends_are_read():
    script = "A=" + "x" * 100_000 + "\n" + "B+=(--flag $A)\n" * 20 + "show ${B[@]}\n" + "while :; do A=1; done\n" * 2000
    ((_, *words),) = read_script(script, {}).commands
    assert words == ["--flag", "x" * 100_000] * 20
