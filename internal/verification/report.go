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

const note = "What was tried inside is told by the template's own Python: a hostile template can lie about it. " +
	"What the server recorded and what this machine shows cannot be changed from inside."

// A Report is what a verification came to.
type Report struct {
	ID       string    `json:"id"` // of its entries in the audit; empty: not recorded
	Template string    `json:"template"`
	Started  time.Time `json:"started"`
	Passed   int       `json:"passed"`
	Failed   int       `json:"failed"`
	Results  []Result  `json:"results"`
	Note     string    `json:"note"` // what the results do not show
}

func (r *Report) add(out Result) {
	r.Results = append(r.Results, out)
	if out.Passed {
		r.Passed++
	} else {
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

// Line returns a result in at most two lines of 100 columns, and more only to say
// why it failed.
func (r *Result) Line() string {
	mark := "ok  "
	if !r.Passed {
		mark = "FAIL"
	}
	var b strings.Builder
	fmt.Fprintf(&b, "%s  %-20s %s\n", mark, r.ID, fit(r.Tried, 64))
	lead, text := "seen", r.Seen+"; expected "+r.Expected
	fmt.Fprintf(&b, "      %5d ms  %s: ", r.Duration, lead)
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

func fit(s string, most int) string {
	if rs := []rune(s); len(rs) > most {
		return string(rs[:most-1]) + "…"
	}
	return s
}

// JUnit returns the report in the XML of JUnit, which CI services read: a suite for
// each group.
func (r *Report) JUnit() ([]byte, error) {
	type failure struct {
		Message string `xml:"message,attr"`
		Text    string `xml:",chardata"`
	}
	type testcase struct {
		Class   string   `xml:"classname,attr"`
		Name    string   `xml:"name,attr"`
		Time    string   `xml:"time,attr"` // seconds
		Failure *failure `xml:"failure"`
	}
	type suite struct {
		Name     string     `xml:"name,attr"`
		Tests    int        `xml:"tests,attr"`
		Failures int        `xml:"failures,attr"`
		Time     string     `xml:"time,attr"`
		Stamp    string     `xml:"timestamp,attr"`
		Cases    []testcase `xml:"testcase"`
	}
	type suites struct {
		XMLName  xml.Name `xml:"testsuites"`
		Name     string   `xml:"name,attr"`
		Tests    int      `xml:"tests,attr"`
		Failures int      `xml:"failures,attr"`
		Suites   []*suite `xml:"testsuite"`
	}
	seconds := func(ms int64) string { return fmt.Sprintf("%d.%03d", ms/1000, ms%1000) }
	all := suites{Name: "postern verify", Tests: r.Passed + r.Failed, Failures: r.Failed}
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
		if !x.Passed {
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
