_fedncv() {
  local word about
  local -a found shown
  while IFS=$'\t' read -r word about; do
    if [[ $word == file ]]; then
      _files
      return
    fi
    found+=("$word")
    shown+=("$word${about:+  -- $about}")
  done < <(__fedncv_candidates "${(@)words[2,CURRENT-1]}" "$words[CURRENT]")
  if [[ $#found == 1 && $found[1] == *= ]]; then compadd -S "" -a found; else compadd -l -d shown -a found; fi
}
if [[ $funcstack[1] == _fedncv ]]; then _fedncv "$@"; else compdef _fedncv fedncv; fi
