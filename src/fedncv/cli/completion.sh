# __fedncv_candidates WORD... CURRENT: print what may stand at the end, as lines of word, tab, meaning; "file" for files
__fedncv_candidates() {
  local cmd="" option="" given=0 word cur value base name
  while [ $# -gt 1 ]; do
    word=$1
    shift
    case "$word" in
      -q|-v|-h|--quiet|--verbose|--help) ;;
      --*=*) option="" ;;
      --*) option=$word; given=0 ;;
      *)
        given=$((given + 1))
        if [ -z "$cmd" ]; then cmd=$word; given=0
        elif [ "$cmd" = federation ]; then cmd="federation $word"; given=0
        fi ;;
    esac
  done
  cur=$1
  if [ -z "$cmd" ]; then __fedncv_commands; return; fi
  if [ "$cmd" = federation ]; then __fedncv_actions; return; fi
  case "$cur" in
    --*=*) option=${cur%%=*}; given=0 ;;
    -*) __fedncv_options "$cmd"; return ;;
  esac
  value=""
  if [ -n "$option" ]; then value=$(__fedncv_value "$cmd $option"); fi
  case "$value" in
    many*) value=${value#* } ;;
    one*) if [ "$given" = 0 ]; then value=${value#* }; else value=$(__fedncv_arguments "$cmd"); fi ;;
    *) value=$(__fedncv_arguments "$cmd") ;;
  esac
  base=""
  case "$cur" in --*=*) base=${cur%%=*}=; cur=${cur#*=} ;; esac
  case "$value" in
    file) printf 'file\n' ;;
    other|"") ;;
    choices*) printf '%s\n' "${value#* }" | tr ' ' '\n' | sed "s|^|$base|" ;;
    method)
      name=${cur##*+}
      case "$name" in
        *:*)
          case "$cur" in *,*) base=$base${cur%,*}, ;; *) base=$base${cur%:*}: ;; esac
          __fedncv_knobs "${name%%:*}" | sed "s|^|$base|; s|\$|=|" ;;
        *)
          case "$cur" in
            +*) __fedncv_switches | sed "s|^|$base+|" ;;
            *+*) __fedncv_switches | sed "s|^|$base${cur%+*}+|" ;;
            *) __fedncv_words method | sed "s|^|$base|" ;;
          esac ;;
      esac ;;
    *) __fedncv_words "$value" | sed "s|^|$base|" ;;
  esac
}
