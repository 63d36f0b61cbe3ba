package people_test

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"testing"

	"github.com/fxamacker/cbor/v2"

	"postern/internal/people"
)

// Flags of authenticator data (W3C Web Authentication Level 3, section 6.1).
const (
	present  = 0x01
	verified = 0x04
	attested = 0x40
)

// A device is an authenticator that holds one passkey, in a browser at origin.
type device struct {
	t      *testing.T
	origin string
	flags  byte
	count  uint32
	id     []byte
	user   []byte
	key    *ecdsa.PrivateKey
}

func newDevice(t *testing.T, origin string) *device {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	id := make([]byte, 16)
	rand.Read(id)
	return &device{t: t, origin: origin, flags: present | verified, id: id, key: key}
}

// options are what a server asks, as far as a device needs it.
type options struct {
	Challenge string
	RPID      string
	RP        struct{ ID string }
	User      struct{ ID string }
}

func (d *device) read(q people.Question) (o options) {
	d.t.Helper()
	if err := json.Unmarshal([]byte(q.Options), &o); err != nil {
		d.t.Fatal(err)
	}
	if o.RPID == "" {
		o.RPID = o.RP.ID
	}
	return o
}

func b64(b []byte) string { return base64.RawURLEncoding.EncodeToString(b) }

func (d *device) client(kind, challenge string) []byte {
	d.t.Helper()
	b, err := json.Marshal(map[string]any{"type": kind, "challenge": challenge, "origin": d.origin, "crossOrigin": false})
	if err != nil {
		d.t.Fatal(err)
	}
	return b
}

func (d *device) data(rp string, flags byte) []byte {
	sum := sha256.Sum256([]byte(rp))
	return binary.BigEndian.AppendUint32(append(sum[:], flags), d.count)
}

// create answers the question for a new passkey.
func (d *device) create(q people.Question) []byte {
	d.t.Helper()
	o := d.read(q)
	user, err := base64.RawURLEncoding.DecodeString(o.User.ID)
	if err != nil {
		d.t.Fatal(err)
	}
	d.user = user
	point, err := d.key.PublicKey.Bytes() // 4, X, Y
	if err != nil {
		d.t.Fatal(err)
	}
	public, err := cbor.Marshal(map[int]any{1: 2, 3: -7, -1: 1, -2: point[1:33], -3: point[33:65]}) // RFC 9053: EC2, ES256, P-256
	if err != nil {
		d.t.Fatal(err)
	}
	data := append(d.data(o.RPID, d.flags|attested), make([]byte, 16)...)
	data = binary.BigEndian.AppendUint16(data, uint16(len(d.id)))
	data = append(append(data, d.id...), public...)
	object, err := cbor.Marshal(map[string]any{"fmt": "none", "attStmt": map[string]any{}, "authData": data})
	if err != nil {
		d.t.Fatal(err)
	}
	return d.answer(map[string]any{"clientDataJSON": b64(d.client("webauthn.create", o.Challenge)), "attestationObject": b64(object), "transports": []string{"internal"}})
}

// get answers the question for a passkey.
func (d *device) get(q people.Question) []byte {
	d.t.Helper()
	o := d.read(q)
	client := d.client("webauthn.get", o.Challenge)
	data := d.data(o.RPID, d.flags)
	hash := sha256.Sum256(client)
	digest := sha256.Sum256(append(append([]byte{}, data...), hash[:]...))
	sig, err := ecdsa.SignASN1(rand.Reader, d.key, digest[:])
	if err != nil {
		d.t.Fatal(err)
	}
	return d.answer(map[string]any{"clientDataJSON": b64(client), "authenticatorData": b64(data), "signature": b64(sig), "userHandle": b64(d.user)})
}

func (d *device) answer(response map[string]any) []byte {
	d.t.Helper()
	b, err := json.Marshal(map[string]any{"id": b64(d.id), "rawId": b64(d.id), "type": "public-key", "response": response, "clientExtensionResults": map[string]any{}})
	if err != nil {
		d.t.Fatal(err)
	}
	return b
}
