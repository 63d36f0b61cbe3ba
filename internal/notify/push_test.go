package notify_test

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/ecdh"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"errors"
	"io"
	"math/big"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"postern/internal/auth"
	"postern/internal/notify"
	"postern/internal/store"
	"postern/internal/storetest"
)

var b64 = base64.RawURLEncoding

// A pushService is a stand-in for a browser's push service and the browser behind it: it
// checks what RFC 8030 and RFC 8292 ask for, and decrypts with code of its own.
type pushService struct {
	t   *testing.T
	url string

	key    *ecdh.PrivateKey
	secret []byte

	mu       sync.Mutex
	messages []map[string]string
	topics   []string
	status   int
}

func newPushService(t *testing.T) *pushService {
	key, err := ecdh.P256().GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	s := &pushService{t: t, key: key, secret: []byte("0123456789abcdef"), status: http.StatusCreated}
	srv := httptest.NewServer(s)
	t.Cleanup(srv.Close)
	s.url = srv.URL
	return s
}

func (s *pushService) subscription() notify.Subscription {
	return notify.Subscription{Endpoint: s.url + "/push/1", P256DH: b64.EncodeToString(s.key.PublicKey().Bytes()), Auth: b64.EncodeToString(s.secret)}
}

// expand is HKDF of RFC 5869 by hand, for one block.
func expand(salt, ikm []byte, info string, n int) []byte {
	mac := func(key []byte, parts ...[]byte) []byte {
		m := hmac.New(sha256.New, key)
		for _, p := range parts {
			m.Write(p)
		}
		return m.Sum(nil)
	}
	return mac(mac(salt, ikm), []byte(info), []byte{1})[:n]
}

// decryptPush reads a message of RFC 8291 as a browser does.
func decryptPush(b []byte, key *ecdh.PrivateKey, secret []byte) ([]byte, error) {
	if len(b) < 21 || len(b) < 21+int(b[20]) || binary.BigEndian.Uint32(b[16:20]) < 18 {
		return nil, errors.New("no header")
	}
	salt, sender, body := b[:16], b[21:21+int(b[20])], b[21+int(b[20]):]
	from, err := ecdh.P256().NewPublicKey(sender)
	if err != nil {
		return nil, err
	}
	shared, err := key.ECDH(from)
	if err != nil {
		return nil, err
	}
	ikm := expand(secret, shared, "WebPush: info\x00"+string(key.PublicKey().Bytes())+string(sender), 32)
	block, err := aes.NewCipher(expand(salt, ikm, "Content-Encoding: aes128gcm\x00", 16))
	if err != nil {
		return nil, err
	}
	aead, err := cipher.NewGCM(block)
	if err != nil {
		return nil, err
	}
	plain, err := aead.Open(nil, expand(salt, ikm, "Content-Encoding: nonce\x00", 12), body, nil)
	if err != nil {
		return nil, err
	}
	i := strings.LastIndexByte(string(plain), 2)
	if i < 0 || strings.Trim(string(plain[i+1:]), "\x00") != "" {
		return nil, errors.New("no padding delimiter")
	}
	return plain[:i], nil
}

func (s *pushService) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.status >= 300 {
		w.WriteHeader(s.status)
		return
	}
	if why := s.check(r); why != "" {
		s.t.Errorf("push: %s", why)
		w.WriteHeader(http.StatusBadRequest)
		return
	}
	b, _ := io.ReadAll(r.Body)
	plain, err := decryptPush(b, s.key, s.secret)
	if err != nil || len(b) > 4096 {
		s.t.Errorf("decrypt %d bytes: %v", len(b), err)
		w.WriteHeader(http.StatusBadRequest)
		return
	}
	m := map[string]string{}
	if err := json.Unmarshal(plain, &m); err != nil {
		s.t.Error(err)
	}
	s.messages = append(s.messages, m)
	s.topics = append(s.topics, r.Header.Get("Topic"))
	w.WriteHeader(s.status)
}

// check checks headers: the signature of VAPID, and RFC 8030's.
func (s *pushService) check(r *http.Request) string {
	if ttl, err := strconv.Atoi(r.Header.Get("TTL")); err != nil || ttl < 1 || r.Header.Get("Content-Encoding") != "aes128gcm" || len(r.Header.Get("Topic")) > 32 {
		return "headers"
	}
	token, rest, ok := strings.Cut(strings.TrimPrefix(r.Header.Get("Authorization"), "vapid t="), ", k=")
	raw, err := b64.DecodeString(rest)
	if !ok || err != nil || len(raw) != 65 {
		return "no key"
	}
	parts := strings.Split(token, ".")
	if len(parts) != 3 {
		return "no token"
	}
	sig, err := b64.DecodeString(parts[2])
	if err != nil || len(sig) != 64 {
		return "no signature"
	}
	public, err := ecdsa.ParseUncompressedPublicKey(elliptic.P256(), raw)
	if err != nil {
		return "key"
	}
	sum := sha256.Sum256([]byte(parts[0] + "." + parts[1]))
	if !ecdsa.Verify(public, sum[:], new(big.Int).SetBytes(sig[:32]), new(big.Int).SetBytes(sig[32:])) {
		return "the signature does not verify"
	}
	var claims struct {
		Aud, Sub string
		Exp      int64
	}
	b, _ := b64.DecodeString(parts[1])
	if err := json.Unmarshal(b, &claims); err != nil || claims.Aud != s.url || claims.Exp < time.Now().Unix() || claims.Exp > time.Now().Add(24*time.Hour).Unix() || !strings.HasPrefix(claims.Sub, "mailto:") && !strings.HasPrefix(claims.Sub, "https:") {
		return "claims " + string(b)
	}
	return ""
}

func (s *pushService) answer(status int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.status = status
}

func (s *pushService) got() (out []map[string]string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append(out, s.messages...)
}

// TestPush: a browser gets a message that says no more than the person has chosen, and
// one that is gone is forgotten.
func TestPush(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f, push := setup(t, db, nil), newPushService(t)
		bob := f.who("bob", auth.Reviewer)
		if err := f.n.AddDevice(t.Context(), bob, push.subscription(), "Firefox on Linux"); err != nil {
			t.Fatal(err)
		}
		a := f.propose("Dear Bob, a secret.", "x@secret.example")
		f.step()
		got := push.got()
		if len(got) != 1 || got[0]["body"] != "1 action waits" || got[0]["url"] != "/console/actions/"+a.ID || strings.Contains(got[0]["title"], "mail") {
			t.Fatalf("pushed %v", got)
		}
		if err := f.n.SetOwn(t.Context(), bob, &notify.Settings{Detail: true}); err != nil {
			t.Fatal(err)
		}
		f.propose("Dear Bob, a secret.", "x@secret.example")
		f.step()
		if got = push.got(); len(got) != 2 || !strings.Contains(got[1]["body"], "secret[.]example") || strings.Contains(got[1]["body"], "Dear Bob") {
			t.Fatalf("with details: %v", got)
		}
		if n := f.count(`select count(*) from push_device where person_id = 'per_bob' and failed = '' and sent_at > 0`); n != 1 {
			t.Errorf("%d devices, want 1", n)
		}
		if out, err := f.n.SendTest(t.Context(), bob, "bob"); err != nil || len(push.got()) != 3 {
			t.Errorf("test: %v, %v, %d messages", out, err, len(push.got()))
		}
		// 429: again later. 410: never again.
		push.answer(http.StatusTooManyRequests)
		f.propose("third")
		f.step()
		if n := f.count(`select count(*) from notice where channel = 'push' and state = 'waiting'`); n != 1 {
			t.Errorf("%d wait after 429, want 1", n)
		}
		push.answer(http.StatusGone)
		f.propose("fourth")
		f.step()
		if n := f.count(`select count(*) from push_device`); n != 0 {
			t.Errorf("%d devices after 410, want 0", n)
		}
	})
}

// TestPushAddresses: an endpoint is a hostile address.
func TestPushAddresses(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f, push := setup(t, db, func(c *notify.Config) { c.Private = false }), newPushService(t)
		bob := f.who("bob", auth.Reviewer)
		for _, u := range []string{push.url, "http://push.example/", "https://127.0.0.1/", "https://[fd00::1]/", "https://100.64.0.1/", "https://169.254.169.254/", "https://x@push.example/", "javascript:alert(1)", ""} {
			sub := push.subscription()
			sub.Endpoint = u
			if err := f.n.AddDevice(t.Context(), bob, sub, "x"); err == nil {
				t.Errorf("%q: taken", u)
			}
		}
		for _, change := range []func(*notify.Subscription){
			func(s *notify.Subscription) { s.P256DH = b64.EncodeToString(make([]byte, 65)) },
			func(s *notify.Subscription) { s.P256DH = "!" }, func(s *notify.Subscription) { s.Auth = "AAAA" }, func(s *notify.Subscription) { s.Auth = "" },
		} {
			sub := push.subscription()
			sub.Endpoint = "https://push.example/1"
			change(&sub)
			if err := f.n.AddDevice(t.Context(), bob, sub, "x"); !errors.Is(err, notify.ErrInvalid) {
				t.Errorf("%v: %v", sub, err)
			}
		}
		// A name that leads here shows when it is dialled.
		sub := push.subscription()
		sub.Endpoint = strings.Replace(push.url, "http://127.0.0.1", "https://localhost", 1) + "/internal"
		if err := f.n.AddDevice(t.Context(), bob, sub, "x"); err != nil {
			t.Fatal(err)
		}
		f.propose("hello")
		f.step()
		if n := f.count(`select count(*) from notice where channel = 'push' and state = 'failed' and error like '%not public%'`); n != 1 || len(push.got()) != 0 {
			t.Errorf("%d notices to a private address failed, want 1; %v", n, push.got())
		}
		if err := f.n.AddDevice(t.Context(), f.agent, sub, "x"); !errors.Is(err, auth.ErrForbidden) {
			t.Errorf("an agent's browser: %v", err)
		}
		if err := f.n.RemoveDevice(t.Context(), f.who("cat", auth.Reviewer), "dev_x"); !errors.Is(err, store.ErrNotFound) {
			t.Errorf("another person's device: %v", err)
		}
	})
}

// TestPushVector is the example of RFC 8291, section 5.
func TestPushVector(t *testing.T) {
	d := func(s string) []byte {
		b, err := b64.DecodeString(s)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	got, err := notify.EncryptPush([]byte("When I grow up, I want to be a watermelon"),
		d("BCVxsr7N_eNgVRqvHtD0zTZsEc6-VV-JvLexhqUzORcxaOzi6-AYWXvTBHm4bjyPjs7Vd8pZGH6SRpkNtoIAiw4"), d("BTBZMqHH6r4Tts7J_aSIgg"),
		d("yfWPiYE-n46HLnH0KqZOF1fJJU3MYrct3AELtAQ-oRw"), d("DGv6ra1nlYgDCS1FRnbzlw"))
	if err != nil {
		t.Fatal(err)
	}
	want := "DGv6ra1nlYgDCS1FRnbzlwAAEABBBP4z9KsN6nGRTbVYI_c7VJSPQTBtkgcy27mlmlMoZIIgDll6e3vCYLocInmYWAmS6TlzAC8wEqKK6PBru3jl7A_yl95bQpu6cVPTpK4Mqgkf1CXztLVBSt2Ks3oZwbuwXPXLWyouBWLVWGNWQexSgSxsj_Qulcy4a-fN"
	if b64.EncodeToString(got) != want {
		t.Errorf("got  %s\nwant %s", b64.EncodeToString(got), want)
	}
}
