# Sourced by the scripts beside it, from the repository's root: launches SCRIPT with CONFIG on
# NUM_PROCESSES processes, one a GPU. All three may come from the environment.
SCRIPT="${SCRIPT:-scripts/train_sd3.py}"
NUM_PROCESSES="${NUM_PROCESSES:-1}"

# --quiet: a mistake is the trainer's one line, without the launcher's trace. The precision that
# counts is the preset's.
launch=(accelerate launch --quiet --num_machines 1 --mixed_precision no --dynamo_backend no
    --num_processes "$NUM_PROCESSES")
if ((NUM_PROCESSES > 1)); then
    launch+=(--multi_gpu)
fi
exec "${launch[@]}" "$SCRIPT" --config "$CONFIG" "$@"
