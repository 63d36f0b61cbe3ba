package mailbox

import (
	"postern/internal/directory"
	"postern/internal/oversight"
	"postern/internal/policy"
)

// Emptied returns the tables that are emptied when an inbox goes.
func Emptied() map[string]bool {
	m := map[string]bool{"inbox_key": true, "inbox_wrap": true, "inbox_epoch": true}
	for _, h := range holdings {
		m[h.table] = true
	}
	return m
}

// FoldAt makes segments of few messages, so that a test needs few.
func (m *PostOffice) FoldAt(least, most int) { m.Index.foldMin, m.Index.foldMax = least, most }

// LetWait sets how many emails of accounts that signed up themselves may wait.
func (m *PostOffice) LetWait(n int) { m.maxApart = n }

// NameFor and CheckName are nameFor and checkName in our own domain.
func NameFor(text string) string  { return directory.NameFor(text) }
func CheckName(name string) error { return directory.CheckName(name, true) }

// ExecutorOf returns what carries out the actions of a kind that has one effect.
func (m *PostOffice) ExecutorOf(kind policy.Kind) any {
	return map[policy.Kind]any{ModeKind: modeExecutor{m}, AllowKind: allowExecutor{m}, ReceiveKind: arrivalExecutor{m}, policy.KindArchive: arranger{m}}[kind]
}

// Show returns what a reviewer sees of an email.
func (m *PostOffice) Show(a oversight.Action) (oversight.View, error) { return sendExecutor{m}.Show(a) }
