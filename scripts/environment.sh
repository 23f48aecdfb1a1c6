# Sourced by the scripts that make a virtual environment of their own.
#
# PYTHON       the interpreter to make it with; by default the first of python3, python3.13, python3.12 and python3.11 that
#              is new enough
# TORCH_INDEX  where torch comes from on a Linux machine without a GPU (PyTorch's index of CPU builds); empty: wherever
#              pip finds it, as on any other machine

# is_new_enough PYTHON: succeed if this interpreter exists, is new enough and can make virtual environments.
is_new_enough() {
  "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

# base_python: print an interpreter that can make a virtual environment, or say what is missing and fail.
base_python() {
  local candidate
  for candidate in ${PYTHON:+"$PYTHON"} python3 python3.13 python3.12 python3.11; do
    if is_new_enough "$candidate"; then
      echo "$candidate"
      return
    fi
    if [[ -n "${PYTHON:-}" ]]; then break; fi
  done
  {
    echo "error: Python 3.11 or newer with the venv module is needed; ${PYTHON:-python3} is: $("${PYTHON:-python3}" --version 2>&1)"
    echo "Install one (on Debian and Ubuntu: apt install python3 python3-venv), or name it: PYTHON=/path/to/python3 bash $0"
  } >&2
  return 1
}

# install_with FOLDER ARGUMENTS...: let the environment's pip install something. What is imported is compiled to bytecode at
# its first import, a small part of the twenty thousand files; only where Python may not write it down does pip compile all.
install_with() {
  local folder=$1
  shift
  local -a when=(--no-compile)
  if [[ -n "${PYTHONDONTWRITEBYTECODE:-}" ]]; then when=(--compile); fi
  "$folder/bin/python" -m pip install --quiet "${when[@]}" "$@"
}

# installation_stamp [EXTRAS]: what an installation depends on.
installation_stamp() {
  echo "$(cat requirements.txt setup.py csrc/*.h csrc/cpu/* | cksum) ${1:-}"
}

# install_into FOLDER [EXTRAS]: make a virtual environment with this checkout and the tested versions of what it needs.
# Nothing is done where that has been done before for the same files. The package is installed in place: what runs is
# the checkout, with its compiled CPU kernels in vllm_blend/.
install_into() {
  local folder=$1 extras=${2:-} python stamp torch index
  stamp="$(installation_stamp "$extras")"
  if [[ -x "$folder/bin/python" && "$(cat "$folder/.installed" 2>/dev/null)" == "$stamp" ]]; then return; fi
  python="$(base_python)" || return 1
  if [[ -x "$folder/bin/python" ]] && ! is_new_enough "$folder/bin/python"; then
    echo "error: $folder has $("$folder/bin/python" --version 2>&1), and 3.11 or newer is needed: remove that folder" >&2
    return 1
  fi
  echo "installing into $folder ($("$python" --version))"
  "$python" -m venv "$folder"
  # torch by itself first: the download that takes longest should not wait for the resolver.
  torch="$(grep '^torch==' requirements.txt)"
  index="$("$python" scripts/torch_index.py "${torch#torch==}")"
  install_with "$folder" ${index:+--extra-index-url "$index"} "$torch"
  install_with "$folder" -r requirements.txt
  install_with "$folder" --editable ".${extras:+[$extras]}"
  echo "$stamp" >"$folder/.installed"
}

# check_variables: name misspelt variables before anything is installed. A Python that is missing or too old for this is
# reported by base_python.
check_variables() {
  if [[ -n "${VARIABLES_CHECKED:-}" ]] || ! is_new_enough "${PYTHON:-python3}"; then return; fi
  "${PYTHON:-python3}" "$(dirname "${BASH_SOURCE[0]}")/check_variables.py"
  export VARIABLES_CHECKED=1
}
