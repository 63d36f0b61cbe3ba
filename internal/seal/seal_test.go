package seal_test

import (
	"bytes"
	"errors"
	"fmt"
	"testing"

	"postern/internal/seal"
)

// A fixture is an inbox with epochs, and the credential that opens all of them.
type fixture struct {
	cred   seal.Credential
	pairs  []seal.Pair
	epochs []seal.Epoch
}

func setup(t testing.TB, inbox string, epochs int) fixture {
	t.Helper()
	cred, err := seal.CredentialKey("pbk_secret", "crd_1")
	if err != nil {
		t.Fatal(err)
	}
	f := fixture{cred: cred}
	for i := range epochs {
		pair, err := seal.NewPair(inbox, int64(i+1))
		if err != nil {
			t.Fatal(err)
		}
		wrapped, err := pair.WrapFor(cred.PublicKey(), cred.ID)
		if err != nil {
			t.Fatal(err)
		}
		f.pairs = append(f.pairs, pair)
		f.epochs = append(f.epochs, seal.Epoch{Number: int64(i + 1), Public: pair.Public, Wrapped: wrapped[0].Bytes})
	}
	return f
}

func (f fixture) key(t testing.TB, inbox string) *seal.Key {
	t.Helper()
	k, err := seal.NewKey(inbox, seal.Manage, f.cred, f.epochs)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

// TestSealedDataOpensInItsPlaceAlone moves sealed data to each other place.
func TestSealedDataOpensInItsPlaceAlone(t *testing.T) {
	f := setup(t, "ibx_1", 1)
	k := f.key(t, "ibx_1")
	text := []byte("the text of a message")
	public, err := seal.Seal(f.pairs[0].Public, "ibx_1", "msg_1", "summary", text)
	if err != nil {
		t.Fatal(err)
	}
	held, err := k.Seal("msg_1", "summary", text)
	if err != nil {
		t.Fatal(err)
	}
	other, err := seal.Seal(f.pairs[0].Public, "ibx_2", "msg_1", "summary", text)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := k.Open("msg_1", "summary", other); !errors.Is(err, seal.ErrSealed) {
		t.Errorf("data of another inbox: %v", err)
	}
	for form, sealed := range map[string][]byte{"to the public key": public, "by a holder": held} {
		if bytes.Contains(sealed, text) {
			t.Errorf("%s: the text is in the clear", form)
		}
		if got, err := k.Open("msg_1", "summary", sealed); err != nil || !bytes.Equal(got, text) {
			t.Errorf("%s: open = %q, %v", form, got, err)
		}
		if _, err := k.Open("msg_2", "summary", sealed); !errors.Is(err, seal.ErrSealed) {
			t.Errorf("%s, of another message: %v", form, err)
		}
		if _, err := k.Open("msg_1", "message", sealed); !errors.Is(err, seal.ErrSealed) {
			t.Errorf("%s, of another part: %v", form, err)
		}
		for i := range sealed {
			changed := bytes.Clone(sealed)
			changed[i] ^= 1
			if _, err := k.Open("msg_1", "summary", changed); !errors.Is(err, seal.ErrSealed) {
				t.Fatalf("%s, byte %d changed: %v", form, i, err)
			}
			if i > 100 {
				break // the rest is one ciphertext
			}
		}
	}
	if over := len(held) - len(text); over != 40 {
		t.Errorf("sealing by a holder adds %d bytes, not 40", over)
	}
}

// TestLaterEpochsStayClosed: a credential opens the epochs that were wrapped for
// it, and nothing that was sealed after it was revoked.
func TestLaterEpochsStayClosed(t *testing.T) {
	f := setup(t, "ibx_1", 3)
	revoked, err := seal.NewKey("ibx_1", seal.Read, f.cred, f.epochs[:2])
	if err != nil {
		t.Fatal(err)
	}
	for i, pair := range f.pairs {
		sealed, err := seal.Seal(pair.Public, "ibx_1", "msg_1", "message", []byte(fmt.Sprint("epoch ", i)))
		if err != nil {
			t.Fatal(err)
		}
		if got, err := f.key(t, "ibx_1").Open("msg_1", "message", sealed); err != nil || string(got) != fmt.Sprint("epoch ", i) {
			t.Errorf("epoch %d = %q, %v", i, got, err)
		}
		if _, err := revoked.Open("msg_1", "message", sealed); (err == nil) != (i < 2) {
			t.Errorf("epoch %d by a revoked credential: %v", i, err)
		}
	}
}

// TestWrappedKeysOpenInTheirPlaceAlone: what was wrapped for one inbox, epoch or
// credential does not pass for that of another.
func TestWrappedKeysOpenInTheirPlaceAlone(t *testing.T) {
	f := setup(t, "ibx_1", 2)
	if _, err := seal.NewKey("ibx_2", seal.Read, f.cred, f.epochs); !errors.Is(err, seal.ErrSealed) {
		t.Errorf("another inbox: %v", err)
	}
	swapped := []seal.Epoch{f.epochs[0], f.epochs[1]}
	swapped[1].Wrapped = f.epochs[0].Wrapped
	if _, err := seal.NewKey("ibx_1", seal.Read, f.cred, swapped); !errors.Is(err, seal.ErrSealed) {
		t.Errorf("another epoch: %v", err)
	}
	for _, c := range []struct{ secret, id string }{{"pbk_other", "crd_1"}, {"pbk_secret", "crd_2"}} {
		cred, err := seal.CredentialKey(c.secret, c.id)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := seal.NewKey("ibx_1", seal.Read, cred, f.epochs); !errors.Is(err, seal.ErrSealed) {
			t.Errorf("credential %s with %s: %v", c.id, c.secret, err)
		}
	}
	if _, err := seal.NewKey("ibx_1", seal.Read, f.cred, nil); !errors.Is(err, seal.ErrSealed) {
		t.Errorf("no epochs: %v", err)
	}
}

// TestKeyWrapsAllEpochs: a second credential opens what the first one did.
func TestKeyWrapsAllEpochs(t *testing.T) {
	f := setup(t, "ibx_1", 2)
	other, err := seal.CredentialKey("pbk_other", "crd_2")
	if err != nil {
		t.Fatal(err)
	}
	list, err := f.key(t, "ibx_1").WrapFor(other.PublicKey(), other.ID)
	if err != nil || len(list) != 2 {
		t.Fatalf("wrap = %d, %v", len(list), err)
	}
	var epochs []seal.Epoch
	for i, w := range list {
		epochs = append(epochs, seal.Epoch{Number: w.Epoch, Public: f.pairs[i].Public, Wrapped: w.Bytes})
	}
	k, err := seal.NewKey("ibx_1", seal.Read, other, epochs)
	if err != nil {
		t.Fatal(err)
	}
	sealed, err := f.key(t, "ibx_1").Seal("msg_1", "message", []byte("text"))
	if err != nil {
		t.Fatal(err)
	}
	if got, err := k.Open("msg_1", "message", sealed); err != nil || string(got) != "text" {
		t.Errorf("open = %q, %v", got, err)
	}
}

func TestScopesIncludeTheNarrowerOnes(t *testing.T) {
	for _, c := range []struct {
		have, want seal.Scope
		ok         bool
	}{
		{seal.Read, seal.Read, true},
		{seal.Read, seal.Propose, false},
		{seal.Propose, seal.Read, true},
		{seal.Manage, seal.Propose, true},
		{seal.Propose, seal.Draft, true},
		{seal.Propose, seal.Send, true},
		{seal.Draft, seal.Send, false},
		{seal.Draft, seal.Read, false},
		{seal.Send, seal.Read, false},
		{seal.Send, seal.Draft, false},
		{seal.Send, seal.Propose, false},
		{"draft send", seal.Send, true},
		{"draft send", seal.Read, false},
		{"read send", seal.Join(seal.Read, seal.Send), true},
		{seal.Propose, seal.Manage, false},
		{"send root", seal.Send, false},
		{seal.Recover, seal.Read, false},
		{seal.Recover, seal.Recover, false},
		{"", "", false},
		{seal.Manage, "root", false},
		{"root", seal.Read, false},
	} {
		if got := c.have.Includes(c.want); got != c.ok {
			t.Errorf("%q includes %q = %v", c.have, c.want, got)
		}
	}
	for in, want := range map[seal.Scope]seal.Scope{
		"send read": "read send", "send  draft read": seal.Propose, "propose read": seal.Propose, "full read": seal.Manage, "recover": "", "read recover": "", "": "", "read root": "",
	} {
		if got := seal.Join(in); got != want {
			t.Errorf("join(%q) = %q, want %q", in, got, want)
		}
		if in.Valid() && in != want || want != "" && !want.Valid() {
			t.Errorf("%q is valid", in)
		}
	}
	for s, opens := range map[seal.Scope]bool{seal.Read: true, seal.Propose: true, seal.Manage: true, seal.Recover: true, seal.Send: false, seal.Draft: false, "draft send": false, "": false, "root": false} {
		if s.Opens() != opens {
			t.Errorf("%q opens = %v", s, !opens)
		}
	}
	var none seal.Key
	if none.Allows(seal.Read) {
		t.Error("the zero key reads")
	}
	k := setup(t, "ibx_1", 1).key(t, "ibx_1")
	k.Narrow(seal.Read)
	if !k.Allows(seal.Read) || k.Allows(seal.Propose) {
		t.Errorf("a narrowed key has scope %q", k.Scope())
	}
	if k.Narrow(seal.Manage); k.Allows(seal.Read) {
		t.Errorf("a key that was narrowed to more has scope %q", k.Scope())
	}
}

// FuzzOpen opens what somebody who can write the database put in the place of
// sealed data.
func FuzzOpen(f *testing.F) {
	x := setup(f, "ibx_1", 1)
	k := x.key(f, "ibx_1")
	public, err := seal.Seal(x.pairs[0].Public, "ibx_1", "msg_1", "summary", []byte("text"))
	if err != nil {
		f.Fatal(err)
	}
	held, err := k.Seal("msg_1", "summary", []byte("text"))
	if err != nil {
		f.Fatal(err)
	}
	for _, sealed := range [][]byte{public, held} {
		f.Add(sealed)
		f.Add(sealed[:len(sealed)-1])
		f.Add(sealed[:13])
		f.Add(sealed[:12])
		f.Add(append(bytes.Clone(sealed), 0))
	}
	f.Add(public[12:]) // as before there were epochs
	f.Add(append(bytes.Clone(held[:12]), public[12:]...))
	f.Add(append(bytes.Clone(public[:12]), held[12:]...))
	f.Add([]byte("PS2h"))
	f.Add([]byte("PS2s12345678"))
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, data []byte) {
		got, err := k.Open("msg_1", "summary", data)
		genuine := bytes.Equal(data, public) || bytes.Equal(data, held) || bytes.Equal(data, public[12:])
		if genuine != (err == nil) || genuine && string(got) != "text" || !genuine && !errors.Is(err, seal.ErrSealed) {
			t.Errorf("open = %q, %v", got, err)
		}
	})
}

// FuzzNewKey unwraps what somebody who can write the database put in the place of
// a wrapped key.
func FuzzNewKey(f *testing.F) {
	x := setup(f, "ibx_1", 1)
	wrapped := x.epochs[0].Wrapped
	sealed, err := seal.Seal(x.pairs[0].Public, "ibx_1", "msg_1", "summary", []byte("text"))
	if err != nil {
		f.Fatal(err)
	}
	f.Add(wrapped)
	f.Add(wrapped[:len(wrapped)-1])
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, data []byte) {
		e := x.epochs[0]
		e.Wrapped = data
		k, err := seal.NewKey("ibx_1", seal.Read, x.cred, []seal.Epoch{e})
		if genuine := bytes.Equal(data, wrapped); genuine && err != nil {
			t.Errorf("new key: %v", err)
		} else if !genuine && err == nil {
			// Another key, wrapped for the same credential: anybody can do that with the
			// credential's public half, and the fuzzer's processes each have a key of their
			// own. It opens nothing that was sealed to the inbox's key.
			if got, err := k.Open("msg_1", "summary", sealed); !errors.Is(err, seal.ErrSealed) {
				t.Errorf("an exchanged key opens %q, %v", got, err)
			}
		}
		if _, err := seal.NewLegacyKey("ibx_1", seal.Read, x.cred, "pbk_secret", []seal.Epoch{e}); !errors.Is(err, seal.ErrSealed) {
			t.Errorf("legacy key: %v", err)
		}
	})
}
