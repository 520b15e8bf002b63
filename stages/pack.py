"""Write .source.json, so that a copy of this tree without its git folder knows its commit (`make pack`)."""

import sys

from stages import ROOT


def main() -> int:
    from tilerank.errors import TilerankError
    from tilerank.provenance import SOURCE_FILE, source_state, write_source_file

    try:
        state = source_state(ROOT)
        if state.commit is None:
            raise TilerankError(f"{ROOT} is no git checkout with a commit to name; pack in one, then copy the tree")
        write_source_file(state, ROOT)
    except TilerankError as error:
        print(f"pack: {error}", file=sys.stderr)
        return 1
    print(f"{SOURCE_FILE}: commit {state.commit}, {'dirty' if state.dirty else 'clean'}; copy it with the tree")
    return 0


if __name__ == "__main__":
    sys.exit(main())
