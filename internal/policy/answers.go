package policy

import (
	"fmt"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

// MaxAnswers is how many automatic answers an inbox and an address may exchange within an
// hour. Of two inboxes of one server these are the answers of both.
const MaxAnswers = 6

// The names, in [Verdict.Rule], of what holds automatic mail for a person in every mode.
const (
	RuleMachines = "answers_to_machines" // it would answer a program
	RuleAnswers  = "automatic_answers"   // [MaxAnswers] is reached
)

// A Machine is a recipient of outgoing mail that seems to be a program.
type Machine struct {
	Address string `json:"address"`
	Why     string `json:"why"` // how that is known, for people and agents; nothing of a sender's
}

// maxMachines bounds the addresses that a document lets inboxes answer.
const maxMachines = 200

// unnamed returns the machines of r that d's key machines does not name.
func (d *Document) unnamed(r Request) (out []Machine) {
	for _, m := range r.Machines {
		if d == nil || !d.namesMachine(m.Address) {
			out = append(out, m)
		}
	}
	return out
}

func (d *Document) namesMachine(address string) bool {
	address = Address(address)
	return slices.Contains(d.machines, address) || slices.Contains(d.machines, "*"+address[max(strings.LastIndexByte(address, '@'), 0):])
}

// automatic returns the verdict on mail that v lets leave without a person, and that must
// not in any mode: an answer to a program, or one too many of two that answer each other.
// The attack: two programs, each of which answers whatever comes, at once and for ever;
// RFC 3834 section 2.
func (d *Document) automatic(r Request) (Verdict, bool) {
	if r.Kind != KindSend {
		return Verdict{}, false
	}
	if r.Answers >= MaxAnswers {
		return Verdict{Effect: Ask, Rule: RuleAnswers, Reason: fmt.Sprintf("%d automatic answers between the inbox and %s left within the last hour, which is the limit: a person decides, since two programs may be answering each other", r.Answers, r.AnswersTo)}, true
	}
	if m := d.unnamed(r); len(m) > 0 {
		return Verdict{Effect: Ask, Rule: RuleMachines, Reason: fmt.Sprintf("it would answer a machine: the last mail of %s, or the one that this answers, was automatic (%s): a person decides in every mode, unless the policy's key machines names the address", m[0].Address, m[0].Why)}, true
	}
	return Verdict{}, false
}

// parseMachines reads the key machines of a document.
func (d *Document) parseMachines(n *yaml.Node, path string) error {
	return sequence(n, path, maxMachines, func(n *yaml.Node, path string) error {
		s, err := text1(n, path, 320)
		if err != nil {
			return err
		}
		local, host, ok := strings.Cut(s, "@")
		name, named := Host(host)
		if !ok || local == "" || !named || !strings.Contains(name, ".") || local != "*" && strings.ContainsAny(local, "*\" \t") {
			return wrong(n, path, "%q: must be an address (bot@example.com) or a whole domain (*@example.com)", clip(s))
		}
		d.machines = append(d.machines, Address(s))
		return nil
	})
}
