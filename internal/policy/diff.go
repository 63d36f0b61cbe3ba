package policy

import (
	"fmt"
	"slices"
	"strings"
)

// around is the number of context lines around a change.
const around = 3

// maxCells bounds the table of one comparison. Larger texts are shown as removed
// and added as a whole.
const maxCells = 4 << 20

// Diff returns the lines in which two texts differ, as "diff -u" writes them
// without its first two lines; empty if they do not.
func Diff(was, is string) string {
	if was == is {
		return ""
	}
	a, b := lines(was), lines(is)
	edits := compare(a, b)
	var out strings.Builder
	for i := 0; i < len(edits); {
		if edits[i].op == ' ' {
			i++
			continue
		}
		from := max(i-around, 0)
		to, same := i, 0 // the hunk ends where twice the context is the same
		for to < len(edits) && same <= 2*around {
			if same++; edits[to].op != ' ' {
				same = 0
			}
			to++
		}
		if same > around {
			to -= same - around
		}
		hunk := edits[from:to]
		na, nb := 0, 0
		for _, e := range hunk {
			if e.op != '+' {
				na++
			}
			if e.op != '-' {
				nb++
			}
		}
		fmt.Fprintf(&out, "@@ -%d,%d +%d,%d @@\n", hunk[0].a+1, na, hunk[0].b+1, nb)
		for _, e := range hunk {
			fmt.Fprintf(&out, "%c%s\n", e.op, e.line)
		}
		i = to
	}
	return out.String()
}

// An edit is one line: kept ' ', removed '-' or added '+'.
type edit struct {
	op   byte
	line string
	a, b int // where it stands in both texts, from 0
}

func lines(s string) []string {
	if s == "" {
		return nil
	}
	return strings.Split(strings.TrimSuffix(s, "\n"), "\n")
}

// compare returns the edits that make b of a, by their longest common
// subsequence between what both begin and end with.
func compare(a, b []string) []edit {
	head := 0
	for head < len(a) && head < len(b) && a[head] == b[head] {
		head++
	}
	tail := 0
	for tail < len(a)-head && tail < len(b)-head && a[len(a)-1-tail] == b[len(b)-1-tail] {
		tail++
	}
	n, m := len(a)-head-tail, len(b)-head-tail
	var edits []edit
	i, j := 0, 0
	put := func(op byte) {
		e := edit{op: op, a: i, b: j}
		if op == '+' {
			e.line = b[j]
		} else {
			e.line = a[i]
		}
		if op != '+' {
			i++
		}
		if op != '-' {
			j++
		}
		edits = append(edits, e)
	}
	for range head {
		put(' ')
	}
	if n*m <= maxCells {
		// common[x][y] is the length of what is common to a from x and b from y.
		common := make([]int32, (n+1)*(m+1))
		at := func(x, y int) int { return x*(m+1) + y }
		for x := n - 1; x >= 0; x-- {
			for y := m - 1; y >= 0; y-- {
				if a[head+x] == b[head+y] {
					common[at(x, y)] = common[at(x+1, y+1)] + 1
				} else {
					common[at(x, y)] = max(common[at(x+1, y)], common[at(x, y+1)])
				}
			}
		}
		for i-head < n && j-head < m {
			x, y := i-head, j-head
			switch {
			case a[i] == b[j]:
				put(' ')
			case common[at(x+1, y)] >= common[at(x, y+1)]:
				put('-')
			default:
				put('+')
			}
		}
	}
	for i-head < n {
		put('-')
	}
	for j-head < m {
		put('+')
	}
	for range tail {
		put(' ')
	}
	return slices.Clip(edits)
}
