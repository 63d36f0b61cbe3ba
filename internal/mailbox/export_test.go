package mailbox

import "postern/internal/policy"

// Emptied returns the tables that are emptied when an inbox goes.
func Emptied() map[string]bool {
	m := map[string]bool{"inbox_key": true, "inbox_wrap": true, "inbox_epoch": true}
	for _, h := range holdings {
		m[h.table] = true
	}
	return m
}

// FoldAt makes segments of few messages, so that a test needs few.
func (m *PostOffice) FoldAt(least, most int) { m.foldMin, m.foldMax = least, most }

// NameFor and CheckName are nameFor and checkName in our own domain.
func NameFor(text string) string  { return nameFor(text) }
func CheckName(name string) error { return checkName(name, true) }

// SealedForFuzz returns a key and something that is sealed to it.
func SealedForFuzz() (*Key, []byte, error) {
	public, private, err := newKeys()
	if err != nil {
		return nil, nil, err
	}
	sealed, err := seal(public, "ibx_1", "msg_1", "summary", []byte("text"))
	return &Key{inbox: "ibx_1", epochs: []epochKey{{epoch: 1, id: idOf(public), private: private}}}, sealed, err
}

// OpenForFuzz opens what SealedForFuzz sealed.
func OpenForFuzz(k *Key, sealed []byte) ([]byte, error) { return k.open("msg_1", "summary", sealed) }

// ExecutorOf returns what carries out the actions of a kind that has one effect.
func (m *PostOffice) ExecutorOf(kind string) any {
	return map[string]any{ModeKind: modeExecutor{m}, AllowKind: allowExecutor{m}, ReceiveKind: arrivalExecutor{m}, policy.KindArchive: arranger{m}}[kind]
}
