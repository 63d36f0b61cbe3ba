package policy

import "slices"

// A Mode is the level of oversight of an inbox.
type Mode string

// The modes. What each means is in its row of modeRows.
const (
	ReadOnly   Mode = "read_only"
	GatedAll   Mode = "gated_all"
	GatedSend  Mode = "gated_send"
	Monitored  Mode = "monitored"
	Autonomous Mode = "autonomous"
)

// A modeRow describes a mode. Pages, the command line, the agents' tools and
// actions of kind [KindMode] take their texts from here.
type modeRow struct {
	mode     Mode
	means    string // for people: what happens to mail of the inbox
	forAgent string // the same, for the agent whose inbox it is
}

// modeRows has a row for every mode, the strictest first. [Mode.Looser] compares
// positions in this table.
var modeRows = []modeRow{
	{ReadOnly, "nothing is sent", "you read mail and send none"},
	{
		GatedAll, "outgoing and incoming mail needs approval",
		"incoming mail needs a person's approval before it reaches your inbox, and so does everything that you send",
	},
	{
		GatedSend, "outgoing mail needs approval, except to recipients on the allow list",
		"everything that you send needs a person's approval, except mail to recipients on the allow list",
	},
	{
		Monitored, "outgoing mail leaves at once, and the overseers get a copy",
		"mail that you send leaves at once unless a rule asks a person, and your overseers get a copy",
	},
	{Autonomous, "outgoing mail leaves at once, and nobody gets a copy", "mail that you send leaves at once unless a rule asks a person"},
}

// Modes returns the modes, the strictest first.
func Modes() []Mode {
	out := make([]Mode, len(modeRows))
	for i, r := range modeRows {
		out[i] = r.mode
	}
	return out
}

// rank returns the position of m in modeRows: 0 for the strictest mode, -1 for an
// unknown one.
func (m Mode) rank() int {
	return slices.IndexFunc(modeRows, func(r modeRow) bool { return r.mode == m })
}

// Known reports whether m is one of the modes.
func (m Mode) Known() bool { return m.rank() >= 0 }

// Looser reports whether m has less oversight than other. An unknown mode is
// stricter than every known one, so a damaged value never loosens an inbox.
func (m Mode) Looser(other Mode) bool { return m.rank() > other.rank() }

// Means describes m for people, as in "nothing is sent". An unknown mode is
// returned as it is.
func (m Mode) Means() string {
	if i := m.rank(); i >= 0 {
		return modeRows[i].means
	}
	return string(m)
}

// ForAgent describes m for the agent that owns the inbox, as in "you read mail
// and send none".
func (m Mode) ForAgent() string {
	if i := m.rank(); i >= 0 {
		return modeRows[i].forAgent
	}
	return "ask a person what it means"
}
