package policy

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"
)

const (
	// MaxTrials is how many tests a file has at most.
	MaxTrials = 200
	maxTo     = 1000 // recipients of a test's request
	maxFacts  = 200  // attachments, flags, details of one
)

// trialTime is the time of a test's request that has none: a Monday at noon, so that
// the result of a test does not depend on when it runs.
var trialTime = time.Date(2026, time.January, 5, 12, 0, 0, 0, time.UTC)

// A Trial is a test of a document: a request and the expected verdict.
type Trial struct {
	Name    string
	Line    int // of the file
	Request Request
	Want    Effect

	// Further expectations; nil, 0 and empty mean any.

	Rule      *string // that says it; empty for none
	Approvers int
	Who       []string
	Within    time.Duration
	StepUp    *bool
}

// Check returns the verdict of d on the trial's request, and an error that describes
// the mismatch if it is not the expected one.
func (t *Trial) Check(d *Document) (Verdict, error) {
	v := Decide(d, t.Request)
	var wrongs []string
	differs := func(what string, got, want any) {
		wrongs = append(wrongs, fmt.Sprintf("%s is %v, want %v", what, got, want))
	}
	if v.Effect != t.Want {
		differs("the verdict", v.Effect, t.Want)
	}
	if t.Rule != nil && v.Rule != *t.Rule {
		differs("the rule", orNone(v.Rule), orNone(*t.Rule))
	}
	if t.Approvers > 0 && max(v.Approvers, 1) != t.Approvers {
		differs("the number of approvers", max(v.Approvers, 1), t.Approvers)
	}
	if len(t.Who) > 0 && !slices.Equal(slices.Sorted(slices.Values(v.Who)), slices.Sorted(slices.Values(t.Who))) {
		differs("who is asked", v.Who, t.Who)
	}
	if t.Within > 0 && v.Within != t.Within {
		within := v.Within.String()
		if v.Within == 0 {
			within = "the usual one"
		}
		differs("the time to decide", within, t.Within)
	}
	if t.StepUp != nil && v.StepUp != *t.StepUp {
		differs("step_up", v.StepUp, *t.StepUp)
	}
	if wrongs == nil {
		return v, nil
	}
	return v, fmt.Errorf("line %d: %s: %s (%s)", t.Line, t.Name, strings.Join(wrongs, "; "), v.Reason)
}

func orNone(rule string) string {
	if rule == "" {
		return "none"
	}
	return rule
}

// ParseTrials reads a file of tests. Its error wraps [ErrDocument].
func ParseTrials(text []byte) ([]Trial, error) {
	root, err := parseYAML(text)
	if err != nil {
		return nil, err
	}
	var out []Trial
	err = mapping(root, "", fields{
		"tests": func(n *yaml.Node, path string) error {
			return sequence(n, path, MaxTrials, func(n *yaml.Node, path string) error {
				t, err := parseTrial(n, path)
				out = append(out, t)
				return err
			})
		},
	})
	if err == nil && len(out) == 0 {
		err = wrong(root, "tests", "has no test")
	}
	if err != nil {
		return nil, err
	}
	return out, nil
}

func parseTrial(n *yaml.Node, path string) (t Trial, err error) {
	t.Line = n.Line
	err = mapping(n, path, fields{
		"name": func(n *yaml.Node, path string) (err error) {
			t.Name, err = text1(n, path, 200)
			return err
		},
		"request": func(n *yaml.Node, path string) (err error) {
			t.Request, err = parseRequest(n, path)
			return err
		},
		"want": func(n *yaml.Node, path string) error {
			s, err := text1(n, path, 16)
			t.Want = Effect(s)
			if err == nil && !slices.Contains([]Effect{Allow, Ask, Deny}, t.Want) {
				err = wrong(n, path, "%q: must be allow, ask or deny", clip(s))
			}
			return err
		},
		"rule": func(n *yaml.Node, path string) error {
			s, err := text0(n, path, maxID)
			t.Rule = &s
			return err
		},
		"approvers": func(n *yaml.Node, path string) (err error) {
			t.Approvers, err = number(n, path, 1, MaxApprovers)
			return err
		},
		"who": func(n *yaml.Node, path string) (err error) {
			t.Who, err = texts(n, path, maxWho)
			return err
		},
		"within": func(n *yaml.Node, path string) error {
			s, err := text1(n, path, 32)
			if err != nil {
				return err
			}
			if t.Within, err = duration(s); err != nil || t.Within <= 0 {
				return wrong(n, path, "%q: must be a time such as 90m, 8h or 3d", clip(s))
			}
			return nil
		},
		"step_up": func(n *yaml.Node, path string) error {
			b, err := boolean(n, path)
			t.StepUp = &b
			return err
		},
	})
	switch {
	case err != nil:
	case t.Name == "":
		err = wrong(n, path+".name", "is missing")
	case t.Request.Kind == "":
		err = wrong(n, path+".request", "is missing")
	case t.Want == "":
		err = wrong(n, path+".want", "is missing: must be allow, ask or deny")
	}
	return t, err
}

// parseRequest reads a request, whose fields are named like the variables of
// conditions.
func parseRequest(n *yaml.Node, path string) (r Request, err error) {
	r.Time = trialTime
	http := func() *HTTP {
		if r.HTTP == nil {
			r.HTTP = &HTTP{}
		}
		return r.HTTP
	}
	text := func(to *string) func(*yaml.Node, string) error {
		return func(n *yaml.Node, path string) (err error) {
			*to, err = text0(n, path, 1000)
			return err
		}
	}
	err = mapping(n, path, fields{
		"kind": func(n *yaml.Node, path string) (err error) {
			r.Kind, err = parseKind(n, path)
			return err
		},
		"mode": func(n *yaml.Node, path string) error {
			s, err := text1(n, path, 32)
			r.Mode = Mode(s)
			if err == nil && !r.Mode.Known() {
				err = wrong(n, path, "%q: must be one of %v", clip(s), Modes())
			}
			return err
		},
		"inbox": text(&r.Inbox), "via": text(&r.Via), "from": text(&r.From), "sandbox": text(&r.Sandbox), "template": text(&r.Template),
		"to": func(n *yaml.Node, path string) (err error) {
			r.To, err = texts(n, path, maxTo)
			r.To = lower(r.To)
			return err
		},
		"listed": func(n *yaml.Node, path string) (err error) {
			r.Listed, err = boolean(n, path)
			return err
		},
		"size": func(n *yaml.Node, path string) (err error) {
			r.Size, err = whole(n, path)
			return err
		},
		"files": func(n *yaml.Node, path string) error {
			return sequence(n, path, maxFacts, func(n *yaml.Node, path string) error {
				var f Attachment
				err := mapping(n, path, fields{
					"name": text(&f.Name), "type": text(&f.Type),
					"size": func(n *yaml.Node, path string) (err error) {
						f.Size, err = whole(n, path)
						return err
					},
				})
				r.Files = append(r.Files, f)
				return err
			})
		},
		"flags": func(n *yaml.Node, path string) (err error) {
			r.Flags, err = texts(n, path, maxFacts)
			return err
		},
		"machines": func(n *yaml.Node, path string) error {
			list, err := texts(n, path, maxTo)
			for _, a := range list {
				r.Machines = append(r.Machines, Machine{Address: Address(a), Why: "the test says so"})
			}
			return err
		},
		"answers": func(n *yaml.Node, path string) (err error) {
			r.Answers, err = whole(n, path)
			if len(r.To) > 0 {
				r.AnswersTo = r.To[0]
			}
			return err
		},
		"history": func(n *yaml.Node, path string) error {
			return mapping(n, path, fields{
				"sent": func(n *yaml.Node, path string) (err error) {
					r.History.Sent, err = whole(n, path)
					return err
				},
				"known": func(n *yaml.Node, path string) (err error) {
					r.History.Known, err = number(n, path, 0, maxTo)
					return err
				},
				"replies": func(n *yaml.Node, path string) (err error) {
					r.History.Replies, err = boolean(n, path)
					return err
				},
			})
		},
		"time": func(n *yaml.Node, path string) error {
			s, err := text1(n, path, 64)
			if err != nil {
				return err
			}
			if r.Time, err = time.Parse(time.RFC3339, s); err != nil {
				return wrong(n, path, "%q: must be a time such as 2026-01-31T12:00:00Z", clip(s))
			}
			return nil
		},
		"host": func(n *yaml.Node, path string) (err error) {
			http().Host, err = text1(n, path, 253)
			r.HTTP.Host = strings.ToLower(r.HTTP.Host)
			return err
		},
		"method": func(n *yaml.Node, path string) (err error) {
			http().Method, err = text1(n, path, 64)
			return err
		},
		"path": func(n *yaml.Node, path string) (err error) {
			http().Path, err = text1(n, path, 4000)
			return err
		},
		"query": func(n *yaml.Node, path string) error {
			http().Query = map[string][]string{}
			return eachPair(n, path, "lists of texts", func(k string, n *yaml.Node, path string) (err error) {
				r.HTTP.Query[k], err = texts(n, path, maxFacts)
				return err
			})
		},
		"headers": func(n *yaml.Node, path string) error {
			http().Headers = map[string]string{}
			return eachPair(n, path, "texts", func(k string, n *yaml.Node, path string) (err error) {
				r.HTTP.Headers[strings.ToLower(k)], err = text0(n, path, 1000)
				return err
			})
		},
		"secrets": func(n *yaml.Node, path string) (err error) {
			http().Secrets, err = texts(n, path, maxFacts)
			return err
		},
		"arguments": func(n *yaml.Node, path string) error {
			if err := n.Decode(&r.Arguments); err != nil || r.Arguments == nil {
				return wrong(n, path, "must be an object")
			}
			return nil
		},
		"detail": func(n *yaml.Node, path string) error {
			r.Detail = map[string]string{}
			return eachPair(n, path, "texts", func(k string, n *yaml.Node, path string) (err error) {
				r.Detail[k], err = text0(n, path, 1000)
				return err
			})
		},
	})
	if err == nil && r.Kind == "" {
		err = wrong(n, path+".kind", "is missing")
	}
	if len(r.To) == 0 && r.HTTP != nil && r.HTTP.Host != "" {
		r.To = []string{r.HTTP.Host} // as it is of every request
	}
	if r.Mode == "" && strings.HasPrefix(string(r.Kind), "email.") {
		r.Mode = GatedSend // the default of new inboxes
	}
	return r, err
}

// texts reads a list of texts.
func texts(n *yaml.Node, path string, most int) (out []string, err error) {
	err = sequence(n, path, most, func(n *yaml.Node, path string) error {
		s, err := text1(n, path, 1000)
		out = append(out, s)
		return err
	})
	return out, err
}

// eachPair calls f with each name of a mapping with any names, and its value.
func eachPair(n *yaml.Node, path, of string, f func(k string, n *yaml.Node, path string) error) error {
	if err := plain(n, path); err != nil || n.Kind != yaml.MappingNode || len(n.Content) > 2*maxFacts {
		return wrong(n, path, "must be at most %d names with %s", maxFacts, of)
	}
	for i := 0; i+1 < len(n.Content); i += 2 {
		k, err := text1(n.Content[i], path, maxID)
		if err != nil {
			return err
		}
		if err := f(k, n.Content[i+1], join(path, clip(k))); err != nil {
			return err
		}
	}
	return nil
}
