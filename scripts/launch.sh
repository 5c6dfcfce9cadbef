# Sourced, from the repository's root, by the scripts of single_node/ and multi_node/. They set
# what a published run needs; the environment comes first, for every one of
#   CONFIG             file and preset, such as config/grpo.py:general_ocr_sd3
#   SCRIPT             the model family's train script
#   NUM_PROCESSES      of all machines together, one a GPU
#   NUM_MACHINES       multi_node/ only
#   MASTER_ADDR        multi_node/ only: address of machine 0, as the others reach it
#   MASTER_PORT        a port of machine 0; 29500 if there are several machines, else a free one
#   ACCELERATE_CONFIG  a file of accelerate_configs/, for DeepSpeed or FSDP; without one every GPU
#                      holds a whole replica (DDP), which is enough where a LoRA is trained
# Numbers of processes and machines and the precision in that file do not count: the first two are
# those above, the last is the preset's.

# launch [--config.KEY=VALUE ...]: train on this machine.
launch() {
    NUM_PROCESSES="${NUM_PROCESSES:-1}"
    _check_number NUM_PROCESSES
    [[ -z "${MASTER_PORT:-}" ]] || _check_number MASTER_PORT
    _launch --num_machines 1 --main_process_port "${MASTER_PORT:-0}" -- "$@"
}

# launch_machine RANK [--config.KEY=VALUE ...]: train on NUM_MACHINES machines, this one being
# number RANK from 0 on. NUM_PROCESSES is PER_MACHINE a machine if it is not given.
launch_machine() {
    local rank="${1:-}"
    _check_number NUM_MACHINES
    if ! [[ "$rank" =~ ^(0|[1-9][0-9]{0,8})$ ]] || ((rank >= NUM_MACHINES)); then
        _fail "the first argument must be this machine's rank, from 0 to $((NUM_MACHINES - 1))," \
            "and is ${rank:-missing}: bash $0 0"
    fi
    shift
    NUM_PROCESSES="${NUM_PROCESSES:-$((NUM_MACHINES * PER_MACHINE))}"
    MASTER_PORT="${MASTER_PORT:-29500}"
    _check_number NUM_PROCESSES
    _check_number MASTER_PORT
    if ((NUM_PROCESSES % NUM_MACHINES)); then
        _fail "NUM_PROCESSES ($NUM_PROCESSES) must be a multiple of NUM_MACHINES" \
            "($NUM_MACHINES): every machine runs as many"
    fi
    if ((NUM_MACHINES > 1)) && [[ -z "${MASTER_ADDR:-}" ]]; then
        _fail "MASTER_ADDR is not set: give the address of machine 0 on every machine," \
            "MASTER_ADDR=ADDRESS bash $0 $rank"
    fi
    # DeepSpeed's own launcher would start the other machines itself, over ssh.
    _launch --num_machines "$NUM_MACHINES" --machine_rank "$rank" \
        --main_process_ip "${MASTER_ADDR:-127.0.0.1}" --main_process_port "$MASTER_PORT" \
        --deepspeed_multinode_launcher standard -- "$@"
}

# _launch FLAG ... -- ARGUMENT ...: replace this shell by accelerate, which starts SCRIPT.
_launch() {
    # --quiet: a mistake is the trainer's one line, without the launcher's trace.
    local command=(accelerate launch --quiet --mixed_precision no --dynamo_backend no
        --num_processes "$NUM_PROCESSES")
    if [[ -n "${ACCELERATE_CONFIG:-}" ]]; then
        [[ -f "$ACCELERATE_CONFIG" ]] || _fail "ACCELERATE_CONFIG ($ACCELERATE_CONFIG) is no" \
            "file; there are: $(echo scripts/accelerate_configs/*.yaml)"
        command+=(--config_file "$ACCELERATE_CONFIG")  # with --multi_gpu its kind would not count
    elif ((NUM_PROCESSES > 1)); then
        command+=(--multi_gpu)  # so a file of the user's own does not choose the kind
    else
        command+=(--config_file scripts/accelerate_configs/one_process.yaml)
    fi
    while [[ "$1" != -- ]]; do
        command+=("$1")
        shift
    done
    shift
    # The trainer stops if it is not one of so many.
    export FLOW_GRPO_NUM_PROCESSES="$NUM_PROCESSES"
    exec "${command[@]}" "${SCRIPT:-scripts/train_sd3.py}" --config "$CONFIG" "$@"
}

_check_number() {
    if ! [[ "${!1}" =~ ^[1-9][0-9]{0,8}$ ]]; then
        _fail "$1 (${!1}) must be a whole number from 1 on"
    fi
}

_fail() {
    echo "error: $*" >&2
    exit 2
}
