package policy

import (
	"crypto/sha256"
	_ "embed"
	"errors"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"go.yaml.in/yaml/v3"
)

// Limits of a document. The attack: one whose evaluation takes a second for each
// send, or exhausts the server's memory.
const (
	MaxText       = 64 << 10 // bytes of a document, or of a file of tests
	MaxClauses    = 200      // rules of a document
	maxExpression = 2000     // bytes of a condition
	maxReason     = 500      // bytes
	maxID         = 64
	maxWho        = 20
	maxKinds      = 20
	// MaxApprovers is the largest number of approvals that a rule may ask for.
	MaxApprovers = 10
	minWithin    = time.Minute
	maxWithin    = 90 * 24 * time.Hour
)

// ErrDocument means that a document or a file of tests is invalid. The text names the
// line, the field and the rule.
var ErrDocument = errors.New("invalid policy")

//go:embed default.yaml
var defaultText []byte

// Default returns the document of a project without one of its own.
var Default = sync.OnceValue(func() *Document {
	d, err := Parse(defaultText)
	if err != nil {
		panic(err) // unreachable: a test reads it
	}
	return d
})

// A Document is a project's rules in order. It is immutable, and safe for
// concurrent use: its conditions are compiled when they are first needed, once.
type Document struct {
	text    string
	digest  [sha256.Size]byte
	zone    *time.Location // of the variables hour and weekday
	clauses []Clause

	saysGrave bool     // the document has the key grave
	grave     []string // the kinds of findings that need a tick

	record   []string // what is recorded beyond what always is
	machines []string // recipients that may be answered although they are programs: addresses, and "*@example.com"
}

// A Clause is one rule of a [Document].
type Clause struct {
	ID        string
	Line      int           // where it begins in the text, 1 is the first
	Kinds     []Kind        // that it is about; empty means all
	When      string        // its condition in CEL; empty means always
	Then      Effect        // its effect where it matches
	Reason    string        // for people; never empty
	Approvers int           // for Ask: how many people; 0 means one
	Who       []string      // for Ask: who; empty means everybody who decides
	Within    time.Duration // for Ask: after which it is denied; 0 means the default
	StepUp    bool          // for Ask: deciders must prove a second factor
	Chat      bool          // for Ask: a linked chat account may decide; otherwise only the console and the API

	cond *condition // nil means always
}

// Text returns the document as it was written.
func (d *Document) Text() string { return d.text }

// Digest returns the SHA-256 of the document's text.
func (d *Document) Digest() [sha256.Size]byte { return d.digest }

// Clauses returns the rules, in order. The caller must not change them.
func (d *Document) Clauses() []Clause { return d.clauses }

// Mentions reports whether some rule is about requests of the given kind.
func (d *Document) Mentions(kind Kind) bool {
	return slices.ContainsFunc(d.clauses, func(c Clause) bool { return c.about(kind) })
}

// Names reports whether the rule with this ID names the given kind itself. A rule
// without kinds is about all of them and names none.
func (d *Document) Names(id string, kind Kind) bool {
	return slices.ContainsFunc(d.clauses, func(c Clause) bool { return c.ID == id && slices.Contains(c.Kinds, kind) })
}

// Concerns reports whether a rule that names the given kind could match a request
// to host. All but the kind and the host counts as unknown, and a condition that
// cannot be evaluated could match.
func (d *Document) Concerns(kind Kind, host string) bool {
	return d.possible(kind, host, func(c *Clause) bool { return slices.Contains(c.Kinds, kind) })
}

// ByMethod reports whether a rule that could match a request to host, of the given kind,
// looks at its method. It knows no more than Concerns does.
func (d *Document) ByMethod(kind Kind, host string) bool {
	return d.possible(kind, host, func(c *Clause) bool { return c.about(kind) && c.cond != nil && c.cond.byMethod })
}

// Asks reports whether a rule that could match a request to host, and names the given
// kind, asks a person. It knows no more than Concerns does.
func (d *Document) Asks(kind Kind, host string) bool {
	return d.possible(kind, host, func(c *Clause) bool { return c.Then == Ask && slices.Contains(c.Kinds, kind) })
}

// possible reports whether a rule that is chosen could match a request to host.
func (d *Document) possible(kind Kind, host string, chosen func(*Clause) bool) bool {
	var known map[string]any
	for i := range d.clauses {
		c := &d.clauses[i]
		if !chosen(c) {
			continue
		}
		if c.cond == nil {
			return true
		}
		if known == nil {
			to := []string{Address(host)}
			known = map[string]any{"kind": string(kind), "host": host, "to": to, "domains": domains(to)}
		}
		if c.cond.possible(known) {
			return true
		}
	}
	return false
}

func (c *Clause) about(kind Kind) bool { return len(c.Kinds) == 0 || slices.Contains(c.Kinds, kind) }

var (
	idPattern  = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^[a-z0-9][a-z0-9_-]*$`) })
	whoPattern = sync.OnceValue(func() *regexp.Regexp {
		return regexp.MustCompile(`^(role:(owner|reviewer)|[^\s:,\p{C}][^:,\p{C}]{0,62})$`)
	})
)

// Parse reads a document. Its error wraps [ErrDocument] and names the line and
// the field.
func Parse(text []byte) (*Document, error) {
	root, err := parseYAML(text)
	if err != nil {
		return nil, err
	}
	d := &Document{text: string(text), digest: sha256.Sum256(text), zone: time.UTC}
	rules := false
	err = mapping(root, "", fields{
		"version": func(n *yaml.Node, path string) error {
			_, err := number(n, path, 1, 1)
			return err
		},
		"zone": func(n *yaml.Node, path string) (err error) {
			var name string
			if name, err = text1(n, path, 64); err != nil {
				return err
			}
			if d.zone, err = time.LoadLocation(name); err != nil || name == "Local" {
				return wrong(n, path, "%q is not a time zone such as Europe/Berlin", clip(name))
			}
			return nil
		},
		"grave":    d.parseGrave,
		"record":   d.parseRecord,
		"machines": d.parseMachines,
		"rules": func(n *yaml.Node, path string) error {
			rules = true
			return sequence(n, path, MaxClauses, func(n *yaml.Node, path string) error {
				c, err := parseClause(n, path)
				if err != nil {
					return err
				}
				if i := slices.IndexFunc(d.clauses, func(o Clause) bool { return o.ID == c.ID }); i >= 0 {
					return wrong(n, path+".id", "%q is already the name of the rule in line %d", c.ID, d.clauses[i].Line)
				}
				d.clauses = append(d.clauses, c)
				return nil
			})
		},
	})
	if err == nil && !rules {
		err = wrong(root, "rules", "is missing; write rules: [] for none")
	}
	if err == nil {
		err = d.check(text)
	}
	if err != nil {
		return nil, err
	}
	return d, nil
}

// check type-checks the conditions, so that a document with a broken one is refused
// when it is proposed and not when it is needed.
func (d *Document) check(text []byte) error {
	for i := range d.clauses {
		c := &d.clauses[i]
		if c.cond == nil {
			continue
		}
		if err := c.cond.check(); err != nil {
			return c.cond.locate(c.ID, text, err)
		}
	}
	return nil
}

func parseClause(n *yaml.Node, path string) (c Clause, err error) {
	c.Line = n.Line
	asking := "" // the first field that only a rule that asks can have
	only := func(field string) {
		if asking == "" {
			asking = field
		}
	}
	err = mapping(n, path, fields{
		"id": func(n *yaml.Node, path string) (err error) {
			c.ID, err = text1(n, path, maxID)
			switch {
			case err != nil:
				return err
			case !idPattern().MatchString(c.ID):
				return wrong(n, path, "%q: must be of a-z, 0-9, - and _, and begin with a letter or a digit", clip(c.ID))
			case Mode(c.ID).Known(): // under which [Decide] says what no rule said
				return wrong(n, path, "%q is the name of a mode", c.ID)
			}
			return nil
		},
		"kind": func(n *yaml.Node, path string) error {
			if n.Kind != yaml.SequenceNode { // one needs no list
				k, err := parseKind(n, path)
				c.Kinds = []Kind{k}
				return err
			}
			return sequence(n, path, maxKinds, func(n *yaml.Node, path string) error {
				k, err := parseKind(n, path)
				c.Kinds = append(c.Kinds, k)
				return err
			})
		},
		"when": func(n *yaml.Node, path string) (err error) {
			if c.When, err = text1(n, path, maxExpression); err != nil {
				return err
			}
			c.cond = &condition{source: c.When, node: n}
			return nil
		},
		"then": func(n *yaml.Node, path string) error {
			s, err := text1(n, path, 16)
			c.Then = Effect(s)
			if err == nil && !slices.Contains([]Effect{Allow, Ask, Deny}, c.Then) {
				err = wrong(n, path, "%q: must be allow, ask or deny", clip(s))
			}
			return err
		},
		"reason": func(n *yaml.Node, path string) (err error) {
			c.Reason, err = text1(n, path, maxReason)
			return err
		},
		"approvers": func(n *yaml.Node, path string) (err error) {
			only("approvers")
			c.Approvers, err = number(n, path, 1, MaxApprovers)
			return err
		},
		"who": func(n *yaml.Node, path string) error {
			only("who")
			err := sequence(n, path, maxWho, func(n *yaml.Node, path string) error {
				s, err := text1(n, path, maxID)
				if err == nil && !whoPattern().MatchString(s) {
					err = wrong(n, path, "%q: must be the name of a person, role:owner or role:reviewer", clip(s))
				}
				c.Who = append(c.Who, s)
				return err
			})
			if err == nil && len(c.Who) == 0 {
				err = wrong(n, path, "names nobody, so that nobody could decide; leave it out for everybody who decides")
			}
			return err
		},
		"within": func(n *yaml.Node, path string) error {
			only("within")
			s, err := text1(n, path, 32)
			if err != nil {
				return err
			}
			if c.Within, err = duration(s); err != nil || c.Within < minWithin || c.Within > maxWithin {
				return wrong(n, path, "%q: must be a time from 1m to 90d, such as 90m, 8h or 3d", clip(s))
			}
			return nil
		},
		"step_up": func(n *yaml.Node, path string) (err error) {
			only("step_up")
			c.StepUp, err = boolean(n, path)
			return err
		},
		"chat": func(n *yaml.Node, path string) (err error) {
			only("chat")
			c.Chat, err = boolean(n, path)
			return err
		},
	})
	switch {
	case err != nil:
		return c, err
	case c.ID == "":
		return c, wrong(n, path+".id", "is missing: the record names each rule")
	case c.Then == "":
		return c, wrong(n, path+".then", "is missing: must be allow, ask or deny")
	case asking != "" && c.Then != Ask:
		return c, wrong(n, path+"."+asking, "only a rule that asks has it, and %s says %s", c.ID, c.Then)
	}
	// A rule cannot overrule that a person decides on these kinds. It is refused, since
	// its author would believe that it has an effect.
	for _, k := range c.Kinds {
		if c.Then == Allow && k.Personal() {
			return c, wrong(n, path+".then", "%s is always decided by a person: no rule can allow it", k)
		}
		if c.Then == Deny && k.row().undeniable {
			return c, wrong(n, path+".then", "a rule that denies %s could never be changed again: ask more people instead", k)
		}
	}
	if c.Reason == "" {
		c.Reason = "rule " + c.ID + ": " + string(c.Then)
	}
	return c, nil
}

func parseKind(n *yaml.Node, path string) (Kind, error) {
	s, err := text1(n, path, maxID)
	k := Kind(s)
	// A rule about an unknown kind matches nothing, although the author who misspelt it
	// believes that it denies.
	if err == nil && !k.Known() {
		err = wrong(n, path, "%q: must be a kind of action: %s", clip(s), JoinKinds(Kinds()))
	}
	return k, err
}

// duration is [time.ParseDuration] with days.
func duration(s string) (time.Duration, error) {
	if days, ok := strings.CutSuffix(s, "d"); ok {
		n, err := strconv.Atoi(days)
		if err != nil || n < 0 || n > 1000 {
			return 0, errors.New("not a number of days")
		}
		return time.Duration(n) * 24 * time.Hour, nil
	}
	return time.ParseDuration(s)
}
