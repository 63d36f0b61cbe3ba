package main

import (
	"cmp"
	"fmt"
	"io"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// limit is the part of its value that a figure may lose.
const limit = 0.05

// leastRounds is how many rounds it takes to tell noise from a loss. If nothing but noise is
// between two commits, three rounds name one figure in 70 as lost, five one in thousands.
const leastRounds = 5

// A verdict says what the rounds of two commits show of a figure.
type verdict int

const (
	same   verdict = iota // it lost and gained at most 5 %
	lost                  // it lost more
	gained                // it gained more
	noise                 // the two are more than 5 % apart, and the rounds of one commit are as far apart
	peer                  // it measures another program, on both sides the same: if it differs, the machine did
	gone                  // only the other commit has it
	added                 // only this one has it
)

// A comparison is of one figure.
type comparison struct {
	part string
	key
	verdict
	old, now             float64 // medians of the rounds
	factor               float64 // how many times worse it is now; less than 1 is better
	oldSpread, nowSpread float64 // how far the rounds of a commit are apart, in the figure's unit
}

// peers are the figures of programs that the benchmarks run beside Postern.
var peers = regexp.MustCompile(`/(postfix/|peer-|.*node-alone|.*/direct(-\d+)?$)`)

// compare judges the figures of a part, of which each run has its values.
func compare(part string, old, now []figures) (out []comparison) {
	before, after := gather(old), gather(now)
	for k, a := range after {
		c := comparison{part: part, key: k, now: median(a), nowSpread: spread(a)}
		b, ok := before[k]
		if !ok {
			c.verdict = added
			out = append(out, c)
			continue
		}
		c.old, c.oldSpread = median(b), spread(b)
		c.factor = worse(k.unit, c.old, c.now)
		switch {
		case peers.MatchString(k.name):
			c.verdict = peer
		case max(c.factor, 1/c.factor) <= 1+limit:
			c.verdict = same
		case max(c.oldSpread, c.nowSpread) >= math.Abs(c.now-c.old):
			c.verdict = noise
		case c.factor > 1:
			c.verdict = lost
		default:
			c.verdict = gained
		}
		out = append(out, c)
	}
	for k, b := range before {
		if _, ok := after[k]; !ok {
			out = append(out, comparison{part: part, key: k, verdict: gone, old: median(b)})
		}
	}
	slices.SortFunc(out, func(a, b comparison) int {
		return cmp.Or(cmp.Compare(b.factor, a.factor), strings.Compare(a.name, b.name), strings.Compare(a.unit, b.unit))
	})
	return out
}

// gather makes one list of values of each figure, one of each run.
func gather(runs []figures) figures {
	out := figures{}
	for _, run := range runs {
		for k, v := range run {
			out[k] = append(out[k], median(v))
		}
	}
	return out
}

// worse returns how many times worse a value is than it was. Of what is counted by the
// second more is better, as in Go's own tools; of everything else less is.
func worse(unit string, old, now float64) float64 {
	if strings.HasSuffix(unit, "/s") {
		old, now = now, old
	}
	if old == now {
		return 1
	}
	return now / old // +Inf for what was nothing, as an allocation
}

// spread returns how far values are apart. Of eight or more it leaves out the lowest and
// the highest eighth: among many rounds there is one in which the machine did something
// else.
func spread(values []float64) float64 {
	v := slices.Sorted(slices.Values(values))
	cut := len(v) / 8
	return v[len(v)-1-cut] - v[cut]
}

// show writes what was compared, losses first, and reports whether a figure lost.
func show(w io.Writer, all []comparison) (loss bool) {
	count := map[verdict]int{}
	for _, v := range []struct {
		verdict
		title string
	}{
		{lost, "Lost more than 5 %, and more than the rounds of one commit differ:"},
		{noise, "Noise: more than 5 % apart, but the rounds of one commit differ as much. Look again on a quiet machine, or with more ROUNDS or a longer BENCHTIME:"},
		{gained, "Gained more than 5 %:"},
		{peer, "Other programs, the same beside both commits. If they differ, so did the machine:"},
		{gone, "Only the other commit has:"},
		{added, "Only this one has:"},
	} {
		for _, c := range all {
			if c.verdict != v.verdict {
				continue
			}
			if count[c.verdict]++; count[c.verdict] == 1 {
				_, _ = fmt.Fprintf(w, "\n%s\n", v.title)
			}
			_, _ = fmt.Fprintln(w, c)
		}
	}
	for _, c := range all {
		if c.verdict == same {
			count[same]++
		}
	}
	_, _ = fmt.Fprintf(w, "\n%d lost, %d noise, %d gained, %d the same\n", count[lost], count[noise], count[gained], count[same])
	return count[lost] > 0
}

// String returns a comparison as a line: the factor by which the figure is worse, its name,
// the two medians, and how far the rounds of each commit are apart.
func (c comparison) String() string {
	name := fmt.Sprintf("%-10s %s %s", c.part, c.name, c.unit)
	switch c.verdict {
	case gone:
		return fmt.Sprintf("            %s: %s", name, number(c.old))
	case added:
		return fmt.Sprintf("            %s: %s", name, number(c.now))
	default:
		return fmt.Sprintf("  %6.2f ×  %s: %s, now %s; rounds differ by %s, now %s", c.factor, name, number(c.old), number(c.now), percent(c.oldSpread, c.old), percent(c.nowSpread, c.now))
	}
}

func number(v float64) string { return strconv.FormatFloat(v, 'g', 5, 64) }

func percent(part, of float64) string {
	if part == 0 {
		return "0 %"
	}
	return fmt.Sprintf("%.0f %%", 100*part/math.Abs(of))
}
