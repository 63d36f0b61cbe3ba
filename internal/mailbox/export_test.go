package mailbox

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
