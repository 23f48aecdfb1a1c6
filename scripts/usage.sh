# Sourced by scripts whose first lines are their help.
#
# print_usage SCRIPT: print the comment at a script's beginning.
print_usage() {
  sed -n '2,/^[^#]/{s/^# \{0,1\}//p;}' "$1"
}

# answer_help SCRIPT ARGUMENT...: if the first argument asks for help, print it and leave with 0.
answer_help() {
  case "${2:-}" in
  -h | --help)
    print_usage "$1"
    exit 0
    ;;
  esac
}

# no_arguments SCRIPT ARGUMENT...: answer help, and refuse anything else before any work.
no_arguments() {
  answer_help "$@"
  if (($# > 1)); then
    echo "error: $(basename "$1") takes no arguments, got: ${*:2}. Its settings are variables:" >&2
    print_usage "$1" >&2
    exit 2
  fi
}
