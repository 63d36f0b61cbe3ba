package policy

import "slices"

// A Mode says how closely an inbox is watched.
type Mode string

// The modes. What each means is in its row of modeRows.
const (
	ReadOnly   Mode = "read_only"
	GatedAll   Mode = "gated_all"
	GatedSend  Mode = "gated_send"
	Monitored  Mode = "monitored"
	Autonomous Mode = "autonomous"
)

// A modeRow is what is known of a mode. Pages, the command line, the tools of
// agents and the actions that ask for a mode take their words from here.
type modeRow struct {
	mode     Mode
	means    string // for people: what happens to mail of the inbox
	forAgent string // the same, for the agent whose inbox it is
}

// modeRows has a row for every mode, the closest watched first: this is the order
// of strictness.
var modeRows = []modeRow{
	{ReadOnly, "nothing is sent", "you read mail and send none"},
	{
		GatedAll, "what is sent and what arrives waits for a person",
		"what arrives waits for a person before it is in your inbox, and so does everything that you send",
	},
	{
		GatedSend, "what is sent waits for a person, except to recipients on the allow list",
		"everything that you send waits for a person, except mail to the allow list",
	},
	{
		Monitored, "what is sent leaves at once, and its overseers get a copy",
		"what you send leaves at once unless a rule asks a person, and your overseer gets a copy of it",
	},
	{Autonomous, "what is sent leaves at once, and nobody gets a copy", "what you send leaves at once unless a rule asks a person"},
}

// Modes returns the modes, the closest watched first.
func Modes() []Mode {
	out := make([]Mode, len(modeRows))
	for i, r := range modeRows {
		out[i] = r.mode
	}
	return out
}

// rank returns the place of m in the order of strictness, 0 for the closest
// watched, or -1 if it is not a mode.
func (m Mode) rank() int {
	return slices.IndexFunc(modeRows, func(r modeRow) bool { return r.mode == m })
}

// Known reports whether m is one of the modes.
func (m Mode) Known() bool { return m.rank() >= 0 }

// Looser reports whether m watches an inbox less closely than other does. What
// is not a mode is stricter than every mode.
func (m Mode) Looser(other Mode) bool { return m.rank() > other.rank() }

// Means says for people what m does, "nothing is sent". It is m for what is not a
// mode.
func (m Mode) Means() string {
	if i := m.rank(); i >= 0 {
		return modeRows[i].means
	}
	return string(m)
}

// ForAgent says what m does to the agent whose inbox it is, "you read mail and
// send none".
func (m Mode) ForAgent() string {
	if i := m.rank(); i >= 0 {
		return modeRows[i].forAgent
	}
	return "ask a person what it means"
}
