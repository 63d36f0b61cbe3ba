package oversight

import (
	"fmt"
	"math/bits"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"postern/internal/auth"
)

// TestCountsFewestPeople compares the count of people with going through all ways in
// which human beings can be behind names: it never counts more, and for accounts
// that were opened at most once not fewer either.
func TestCountsFewestPeople(t *testing.T) {
	now := time.UnixMicro(1_900_000_000_000_000).UTC()
	r := rand.New(rand.NewPCG(1, 2))
	exact, below := 0, 0
	for range 2_000 {
		names := []string{"person:local-root", "person:ann", "person:bob", "person:carl", "person:dan"}
		if r.IntN(4) == 0 {
			names[4] = "person:local-alice"
		}
		roll := auth.NewRoll(now)
		may := map[string][]string{} // beside themself
		once := true
		for i, p := range names {
			if auth.Nameless(p) {
				may[p] = slices.Delete(slices.Clone(names), i, i+1)
				continue
			}
			var cs []auth.Change
			for range r.IntN(3) {
				by := names[r.IntN(len(names))]
				if r.IntN(5) == 0 {
					by = "" // the server's link
				}
				cs = append(cs, auth.Change{At: now.Add(-time.Hour), By: by, What: auth.Reset, Was: auth.Owner})
				switch {
				case by == p:
				case by == "" || auth.Nameless(by):
					may[p] = append(may[p], slices.Delete(slices.Clone(names), i, i+1)...)
				default:
					may[p] = append(may[p], by)
				}
			}
			roll.Add(p, auth.Owner, cs...)
			once = once && len(cs) < 2
			slices.Sort(may[p])
			may[p] = slices.Compact(may[p])
		}
		some := func() (out []string) {
			for _, p := range names {
				if r.IntN(2) == 0 {
					out = append(out, p)
				}
			}
			return out
		}
		votes, authors := some(), some()
		if r.IntN(2) == 0 {
			authors = nil
		}
		q := quorum{need: 2, authors: authors, roll: roll}
		got, want := q.count(votes), fewest(names, may, votes, authors)
		switch {
		case got > want:
			t.Fatalf("of %v, whom %v wrote, it counts %d, and %d can be:\n%v", votes, authors, got, want, may)
		case got == want:
			exact++
		case once && !cyclic(names, may):
			t.Fatalf("of %v, whom %v wrote, it counts %d, and fewer than %d cannot be:\n%v", votes, authors, got, want, may)
		default:
			below++
		}
	}
	t.Logf("%d counted exactly, %d below", exact, below)
	if exact < 10*below {
		t.Errorf("%d of %d are counted below what can be", below, exact+below)
	}
}

// cyclic reports whether two accounts were opened by each other, or one by who
// has no name, whom it may be only if that one is somebody else.
func cyclic(names []string, may map[string][]string) bool {
	for _, p := range names {
		for _, o := range may[p] {
			if !auth.Nameless(p) && !auth.Nameless(o) && slices.Contains(may[o], p) {
				return true
			}
		}
	}
	return false
}

// fewest goes through who can be whom.
func fewest(names []string, may map[string][]string, votes, authors []string) int {
	index := func(ps []string) (out []int) {
		for _, p := range ps {
			out = append(out, slices.Index(names, p))
		}
		return out
	}
	voted, wrote := index(votes), index(authors)
	var options [][]int
	for _, p := range names {
		options = append(options, index(append([]string{p}, may[p]...)))
	}
	best := len(names)
	is, human := make([]int, len(names)), make([]int, len(names))
	var try func(i int)
	try = func(i int) {
		if i < len(names) {
			for _, who := range options[i] {
				is[i] = who
				try(i + 1)
			}
			return
		}
		for n := range human { // the smallest of those who are one
			human[n] = n
		}
		for range names {
			for n := range human {
				least := min(human[n], human[is[n]])
				human[n], human[is[n]] = least, least
			}
		}
		var seen uint
		for _, v := range voted {
			seen |= 1 << human[v]
		}
		for _, a := range wrote {
			seen &^= 1 << human[a]
		}
		best = min(best, bits.OnesCount(seen))
	}
	try(0)
	return best
}

// TestNamesOfOnePerson: the names by which people are counted.
func TestNamesOfOnePerson(t *testing.T) {
	now := time.Now()
	opened := func(by string, what auth.Opening, ago time.Duration, was auth.Role) auth.Change {
		return auth.Change{At: now.Add(-ago), By: by, What: what, Was: was}
	}
	r := auth.NewRoll(now)
	r.Add("person:ann", auth.Owner)
	r.Add("person:bob", auth.Owner, opened("person:ann", auth.Joined, time.Hour, ""))
	r.Add("person:carl", auth.Owner, opened("person:bob", auth.Joined, time.Minute, ""))
	r.Add("person:dan", auth.Owner, opened("person:ann", auth.Joined, auth.SettleTime, ""))
	r.Add("person:eve", auth.Owner, opened("person:ann", auth.Joined, time.Hour, ""), opened("person:dan", auth.Reset, time.Minute, auth.Owner))
	r.Add("person:fay", auth.Owner, opened("person:gus", auth.Reset, time.Hour, auth.Owner))
	r.Add("person:gus", auth.Owner, opened("person:fay", auth.Reset, time.Hour, auth.Owner))
	r.Add("person:hal", auth.Owner, opened("", auth.Joined, time.Hour, ""))
	r.Add("person:ida", auth.Owner, opened("person:hal", auth.Joined, time.Hour, ""))
	r.Add("person:jim", auth.Owner, opened("person:ann", auth.RoleChanged, time.Hour, auth.Viewer))
	r.Add("person:kim", auth.Owner, opened("person:ann", auth.RoleChanged, time.Hour, auth.Reviewer))
	r.Add("person:leo", auth.Owner, opened("person:leo", auth.Reset, time.Hour, auth.Owner))
	for name, want := range map[string]string{
		"ann": "ann", "bob": "ann", "carl": "ann", "dan": "dan", "eve": "", "fay": "fay", "gus": "fay", "hal": "", "ida": "",
		"jim": "ann", "kim": "kim", "leo": "leo", "local-root": "", "local": "", "nobody": "nobody", "localhost": "localhost",
	} {
		if want != "" {
			want = "person:" + want
		}
		if got := r.Human("person:" + name); got != want {
			t.Errorf("%s counts as %q, want %q", name, got, want)
		}
	}
	all := func(auth.Principal) bool { return true }
	if got, want := fmt.Sprint(r.Others(all, []string{"person:ann"})), "[person:dan person:fay person:gus person:kim person:leo]"; got != want {
		t.Errorf("a day ago %s could decide, want %s", got, want)
	}
}
