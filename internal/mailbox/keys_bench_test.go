package mailbox_test

import (
	"fmt"
	"testing"

	"postern/internal/keyring"
	"postern/internal/seal"
	"postern/internal/storetest"
)

// BenchmarkOpen is what each request that reads mail pays first, by how often
// the inbox was re-keyed.
func BenchmarkOpen(b *testing.B) {
	for _, epochs := range []int{1, 100} {
		b.Run(fmt.Sprint(epochs), func(b *testing.B) {
			f := setup(b, storetest.SQLite(b))
			box, who, key := f.inbox(b, "analyst")
			k, err := f.post.Keys.Open(b.Context(), who, key, "")
			if err != nil {
				b.Fatal(err)
			}
			for range epochs - 1 {
				p, _, err := f.post.Keys.Add(b.Context(), who, k, keyring.NewKey{Scope: seal.Read})
				if err == nil {
					err = f.post.Keys.Revoke(b.Context(), who, "", p.Credential, false)
				}
				if err != nil {
					b.Fatal(err)
				}
			}
			for b.Loop() {
				if _, err := f.post.Keys.Open(b.Context(), who, key, box.ID); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
