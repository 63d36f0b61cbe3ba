package mailbox

import (
	"context"
	"fmt"
	"strings"
	"time"

	"postern/internal/store"
)

// listed reports whether the allow list of an inbox has every one of to, in
// lower case. An empty list has nobody.
func listed(ctx context.Context, tx *store.Tx, inbox string, to []string) (bool, error) {
	if len(to) == 0 {
		return false, nil
	}
	patterns, err := tx.Strings(ctx, `select pattern from allow_entry where inbox_id = $1 and (expires_at = 0 or expires_at > $2)`, inbox, store.Time(time.Now()))
	if err != nil {
		return false, fmt.Errorf("read allow list of inbox %s: %w", inbox, err)
	}
	has := make(map[string]bool, len(patterns))
	for _, p := range patterns {
		has[p] = true
	}
	for _, address := range to {
		if !allows(has, address) {
			return false, nil
		}
	}
	return true, nil
}

// allows reports whether patterns have an address.
func allows(patterns map[string]bool, address string) bool {
	address = strings.ToLower(address)
	at := strings.LastIndexByte(address, '@')
	if at < 1 || len(patterns) == 0 {
		return false
	}
	if patterns[address] {
		return true
	}
	// The attack: an address at an allowed domain that its server takes as the
	// way to another, eve%evil.example@example.com.
	return !strings.ContainsAny(address[:at], "%!@\"") && patterns["*"+address[at:]]
}
