package verification

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"encoding/xml"
	"fmt"
	"strings"
	"time"
)

const note = "Attempts in sandboxes are made and reported by the template's own Python, so a hostile template can fake them. " +
	"Code in a sandbox cannot change what the server recorded or what was seen on this machine."

// A Report is the result of a verification.
type Report struct {
	ID       string    `json:"id"` // of its entries in the audit; empty if it is not recorded
	Template string    `json:"template"`
	Contract string    `json:"contract,omitempty"` // whose clauses were tried: name@sha256:…
	Changes  []string  `json:"changes,omitempty"`  // what the contract of the probe had otherwise
	Started  time.Time `json:"started"`
	Passed   int       `json:"passed"`
	Failed   int       `json:"failed"`
	Open     int       `json:"open"` // by configuration; not among Passed
	Untried  int       `json:"untried,omitempty"`
	Results  []Result  `json:"results"`
	Note     string    `json:"note"` // what the results cannot prove
}

func (r *Report) add(out Result) {
	r.Results = append(r.Results, out)
	switch out.State {
	case Pass:
		r.Passed++
	case Open:
		r.Open++
	case Untried:
		r.Untried++
	case Fail:
		r.Failed++
	}
}

// Digest returns the SHA-256 of the results as JSON, for the audit.
func (r *Report) Digest() string {
	b, err := json.Marshal(r.Results)
	if err != nil { // unreachable: text and numbers
		panic(err)
	}
	sum := sha256.Sum256(b)
	return "sha256:" + hex.EncodeToString(sum[:])
}

// Line returns a result as text for a terminal of 100 columns: a line of what was tried,
// then what was seen and expected.
func (r *Result) Line() string {
	mark, text := "ok  ", r.Seen+"; expected "+r.Expected
	switch r.State {
	case Pass:
	case Fail:
		mark = "FAIL"
	case Untried:
		mark, text = "--  ", "not tried: "+r.Seen
	case Open:
		mark, text = "open", r.Seen+"; open by configuration: "+strings.Join(r.Settings, ", ")
	}
	var b strings.Builder
	fmt.Fprintf(&b, "%s  %-20s %s\n", mark, r.ID, fit(r.Tried, 64))
	if r.Under != "" {
		text += "; under " + r.Under
	}
	fmt.Fprintf(&b, "      %5d ms  seen: ", r.Duration)
	at := 20
	for i, w := range strings.Fields(text) {
		if i > 0 && at+1+len([]rune(w)) > 100 {
			b.WriteString("\n                    ")
			at = 20
		} else if i > 0 {
			b.WriteByte(' ')
			at++
		}
		b.WriteString(w)
		at += len([]rune(w))
	}
	b.WriteByte('\n')
	return b.String()
}

// fit returns s, cut to at most so many characters.
func fit(s string, most int) string {
	if rs := []rune(s); len(rs) > most {
		return string(rs[:most-1]) + "…"
	}
	return s
}

// JUnit returns the report as JUnit XML, which CI services read, with a suite for each
// group. A check that is open by configuration is a skipped test case.
func (r *Report) JUnit() ([]byte, error) {
	type failure struct {
		Message string `xml:"message,attr"`
		Text    string `xml:",chardata"`
	}
	type skipped struct {
		Message string `xml:"message,attr"`
	}
	type testcase struct {
		Class   string   `xml:"classname,attr"`
		Name    string   `xml:"name,attr"`
		Time    string   `xml:"time,attr"` // seconds
		Failure *failure `xml:"failure"`
		Skipped *skipped `xml:"skipped"`
	}
	type suite struct {
		Name     string     `xml:"name,attr"`
		Tests    int        `xml:"tests,attr"`
		Failures int        `xml:"failures,attr"`
		Skipped  int        `xml:"skipped,attr"`
		Time     string     `xml:"time,attr"`
		Stamp    string     `xml:"timestamp,attr"`
		Cases    []testcase `xml:"testcase"`
	}
	type suites struct {
		XMLName  xml.Name `xml:"testsuites"`
		Name     string   `xml:"name,attr"`
		Tests    int      `xml:"tests,attr"`
		Failures int      `xml:"failures,attr"`
		Skipped  int      `xml:"skipped,attr"`
		Suites   []*suite `xml:"testsuite"`
	}
	seconds := func(ms int64) string { return fmt.Sprintf("%d.%03d", ms/1000, ms%1000) }
	all := suites{Name: "postern verify", Tests: len(r.Results), Failures: r.Failed, Skipped: r.Open + r.Untried}
	took := map[*suite]int64{}
	for i := range r.Results {
		x := &r.Results[i]
		var s *suite
		for _, have := range all.Suites {
			if have.Name == string(x.Group) {
				s = have
			}
		}
		if s == nil {
			s = &suite{Name: string(x.Group), Stamp: r.Started.Format("2006-01-02T15:04:05")}
			all.Suites = append(all.Suites, s)
		}
		c := testcase{Class: "postern.verify." + string(x.Group), Name: x.ID + ": " + x.Tried, Time: seconds(x.Duration)}
		s.Tests++
		switch x.State {
		case Pass:
		case Open:
			s.Skipped++
			c.Skipped = &skipped{"open by configuration: " + strings.Join(x.Settings, ", ") + ": " + x.Seen}
		case Untried:
			s.Skipped++
			c.Skipped = &skipped{"not tried: " + x.Seen}
		case Fail:
			s.Failures++
			c.Failure = &failure{Message: x.Seen, Text: "tried: " + x.Tried + "\nexpected: " + x.Expected + "\nseen: " + x.Seen + "\n"}
		}
		took[s] += x.Duration
		s.Time = seconds(took[s])
		s.Cases = append(s.Cases, c)
	}
	b, err := xml.MarshalIndent(all, "", "  ")
	if err != nil {
		return nil, err
	}
	return append([]byte(xml.Header), append(b, '\n')...), nil
}
