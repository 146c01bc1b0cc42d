_fedncv() {
  local line=${COMP_LINE:0:COMP_POINT} cur="" word about done_
  local -a words=()
  read -ra words <<< "$line"
  case "$line" in *[[:space:]]) ;; *) cur=${words[${#words[@]} - 1]}; unset "words[${#words[@]}-1]" ;; esac
  COMPREPLY=()
  while IFS=$'\t' read -r word about; do
    if [[ $word == file ]]; then
      compopt -o filenames 2> /dev/null
      while IFS= read -r word; do COMPREPLY+=("$word"); done < <(compgen -f -- "$cur")
    elif [[ $word == "$cur"* ]]; then
      COMPREPLY+=("$word")
    fi
  done < <(__fedncv_candidates "${words[@]:1}" "$cur")
  if [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *= ]]; then compopt -o nospace 2> /dev/null; fi
  # readline replaces only what follows the last ":" or "=", at which it breaks words
  done_=""
  case "$cur" in *:*) if [[ $COMP_WORDBREAKS == *:* ]]; then done_=${cur%"${cur##*:}"}; fi ;; esac
  case "${cur#"$done_"}" in *=*) if [[ $COMP_WORDBREAKS == *=* ]]; then done_=${cur%"${cur##*=}"}; fi ;; esac
  if [[ -n $done_ ]]; then COMPREPLY=("${COMPREPLY[@]#"$done_"}"); fi
}
complete -F _fedncv fedncv
