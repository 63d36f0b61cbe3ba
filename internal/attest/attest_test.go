package attest_test

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"encoding/base64"
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/secure-systems-lab/go-securesystemslib/dsse"
	"github.com/secure-systems-lab/go-securesystemslib/signerverifier"

	"postern/internal/attest"
)

func hexSum(c string) string { return strings.Repeat(c, 64) }

// run returns the predicate of a run in which nothing went wrong.
func run() attest.Run {
	at := time.Date(2026, 11, 20, 11, 0, 0, 0, time.UTC)
	r := attest.Run{
		Run: "run_1", Server: "agents.example/runs", Project: "prj_1", Sandbox: "i1", Proposer: "agent:crd_1", Outcome: "succeeded", Reasons: []string{},
		Contract: attest.Named{Name: "report", Digest: "sha256:" + hexSum("a")}, Inputs: []attest.File{}, Steps: []attest.Step{},
		Created: at, Started: at.Add(time.Second), Ended: at.Add(time.Minute), Issued: at.Add(2 * time.Minute),
		Commands:  attest.Commands{Started: 1, Digest: "sha256:" + hexSum("b"), Complete: true},
		Artifacts: []attest.Artifact{{Path: "/out/a\\n.csv", Type: "csv", Size: 3, SHA256: hexSum("c"), State: "waiting", Action: "act_1"}},
		Decisions: []attest.Decision{}, Teardown: []attest.Trace{{What: "processes", Gone: true, At: at.Add(time.Minute)}},
		Audit: attest.Audit{Genesis: hexSum("d"), Seq: 9, Head: hexSum("e"), Root: "AAAA"},
	}
	for _, id := range attest.ClauseIDs() {
		r.Clauses = append(r.Clauses, attest.Clause{ID: id, Verdict: attest.Kept, Rank: attest.RankHost, Evidence: "what the server did", Because: "<seen>"})
	}
	return r
}

func newKey(t testing.TB) (attest.Key, ed25519.PrivateKey) {
	t.Helper()
	public, private, err := ed25519.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	return attest.Key{ID: attest.KeyID(public), Server: "agents.example/runs", Public: public, From: run().Created.Add(-time.Hour)}, private
}

func signed(t testing.TB, r attest.Run) ([]byte, attest.Key) {
	t.Helper()
	key, private := newKey(t)
	b, err := attest.Sign(attest.New(r), key.ID, private)
	if err != nil {
		t.Fatal(err)
	}
	return b, key
}

func TestStatementsVerify(t *testing.T) {
	b, key := signed(t, run())
	v, err := attest.Verify(b, []attest.Key{key})
	if err != nil || v.Statement.Predicate.Run != "run_1" || len(v.Statement.Subject) != 3 || v.Key.ID != key.ID {
		t.Fatalf("%+v, %v", v, err)
	}
	other, _ := newKey(t)
	if _, err := attest.Verify(b, []attest.Key{other}); !errors.Is(err, attest.ErrKey) {
		t.Errorf("by another key: %v", err)
	}
	if _, err := attest.Verify(b, nil); !errors.Is(err, attest.ErrKey) {
		t.Errorf("by no key: %v", err)
	}
	other.ID = key.ID // an ID is a hint, and proves nothing
	if _, err := attest.Verify(b, []attest.Key{other}); !errors.Is(err, attest.ErrSignature) {
		t.Errorf("by another key with the same ID: %v", err)
	}
	late := key
	late.From = run().Issued.Add(time.Hour)
	if _, err := attest.Verify(b, []attest.Key{late}); !errors.Is(err, attest.ErrKey) {
		t.Errorf("by a key before its time: %v", err)
	}
	late = key
	late.Until = run().Issued.Add(-time.Hour)
	if _, err := attest.Verify(b, []attest.Key{late}); !errors.Is(err, attest.ErrKey) {
		t.Errorf("by a key after its time: %v", err)
	}
	late = key
	late.Server = "other.example/runs"
	if _, err := attest.Verify(b, []attest.Key{late}); !errors.Is(err, attest.ErrKey) {
		t.Errorf("by another server's key: %v", err)
	}
}

// TestAStockLibraryVerifies checks a statement with a DSSE library that is not ours.
func TestAStockLibraryVerifies(t *testing.T) {
	b, key := signed(t, run())
	doc, err := attest.KeysDocument([]attest.Key{key})
	if err != nil {
		t.Fatal(err)
	}
	var keys struct {
		Keys []struct {
			KeyID string `json:"keyid"`
			Text  string `json:"pem"`
		} `json:"keys"`
	}
	if err := json.Unmarshal(doc, &keys); err != nil {
		t.Fatal(err)
	}
	k, err := signerverifier.LoadKey([]byte(keys.Keys[0].Text))
	if err != nil {
		t.Fatal(err)
	}
	ed, err := signerverifier.NewED25519SignerVerifierFromSSLibKey(k)
	if err != nil {
		t.Fatal(err)
	}
	verifier, err := dsse.NewEnvelopeVerifier(named{ed, keys.Keys[0].KeyID})
	if err != nil {
		t.Fatal(err)
	}
	var envelope dsse.Envelope
	if err := json.Unmarshal(b, &envelope); err != nil {
		t.Fatal(err)
	}
	accepted, err := verifier.Verify(t.Context(), &envelope)
	if err != nil || len(accepted) != 1 || envelope.PayloadType != attest.PayloadType {
		t.Fatalf("accepted %v, %v", accepted, err)
	}
	payload, err := envelope.DecodeB64Payload()
	if err != nil {
		t.Fatal(err)
	}
	var statement struct {
		Type    string `json:"_type"`
		Subject []struct {
			Name   string            `json:"name"`
			Digest map[string]string `json:"digest"`
		} `json:"subject"`
		PredicateType string         `json:"predicateType"`
		Predicate     map[string]any `json:"predicate"`
	}
	if err := json.Unmarshal(payload, &statement); err != nil || statement.Type != "https://in-toto.io/Statement/v1" || len(statement.Subject) != 3 || statement.Subject[2].Digest["sha256"] != hexSum("c") {
		t.Errorf("%+v, %v", statement, err)
	}
	envelope.Payload = base64.StdEncoding.EncodeToString(bytes.Replace(payload, []byte(`"succeeded"`), []byte(`"failed"`), 1))
	if _, err := verifier.Verify(t.Context(), &envelope); err == nil {
		t.Error("the library accepts a changed statement")
	}
	// In the other direction, Verify accepts what the library signs.
	own, private := newKey(t)
	signer, err := dsse.NewEnvelopeSigner(keySigner{private, own.ID})
	if err != nil {
		t.Fatal(err)
	}
	theirs, err := signer.SignPayload(t.Context(), attest.PayloadType, payload)
	if err != nil {
		t.Fatal(err)
	}
	text, err := json.Marshal(theirs)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := attest.Verify(text, []attest.Key{own}); err != nil {
		t.Errorf("signed by the library: %v", err)
	}
}

// named is a verifier with the ID from the key document. The library would compute
// another one.
type named struct {
	dsse.Verifier
	id string
}

func (n named) KeyID() (string, error) { return n.id, nil }

// keySigner is a dsse.Signer with an Ed25519 key.
type keySigner struct {
	key ed25519.PrivateKey
	id  string
}

func (s keySigner) Sign(_ context.Context, data []byte) ([]byte, error) {
	return ed25519.Sign(s.key, data), nil
}
func (s keySigner) KeyID() (string, error) { return s.id, nil }

func TestContradictionsAreRefused(t *testing.T) {
	clause := func(r *attest.Run, id string) *attest.Clause {
		for i := range r.Clauses {
			if r.Clauses[i].ID == id {
				return &r.Clauses[i]
			}
		}
		t.Fatal(id)
		return nil
	}
	for name, change := range map[string]func(s *attest.Statement){
		"a missing subject":                       func(s *attest.Statement) { s.Subject = s.Subject[:2] },
		"a subject with another digest":           func(s *attest.Statement) { s.Subject[2].Digest["sha256"] = hexSum("f") },
		"a subject with two digests":              func(s *attest.Statement) { s.Subject[2].Digest["sha512"] = "x" },
		"another subject":                         func(s *attest.Statement) { s.Subject[2].Name = "/out/b.csv" },
		"a malformed digest":                      func(s *attest.Statement) { s.Predicate.Contract.Digest = "sha256:abc" },
		"a violation in a succeeded run":          func(s *attest.Statement) { clause(&s.Predicate, "files").Verdict = attest.Violated },
		"kept without evidence":                   func(s *attest.Statement) { clause(&s.Predicate, "files").Rank = attest.RankNone },
		"kept in a lost run":                      func(s *attest.Statement) { s.Predicate.Outcome = "lost" },
		"commands kept without a record":          func(s *attest.Statement) { s.Predicate.Commands.Complete = false },
		"teardown kept with something left":       func(s *attest.Statement) { s.Predicate.Teardown[0].Gone = false },
		"teardown kept without a search":          func(s *attest.Statement) { s.Predicate.Teardown = nil },
		"ended before it was created":             func(s *attest.Statement) { s.Predicate.Ended = s.Predicate.Created.Add(-time.Second) },
		"issued before it ended":                  func(s *attest.Statement) { s.Predicate.Issued = s.Predicate.Created },
		"a missing clause":                        func(s *attest.Statement) { s.Predicate.Clauses = s.Predicate.Clauses[1:] },
		"clauses in another order":                func(s *attest.Statement) { s.Predicate.Clauses[0].ID = "files" },
		"an unknown verdict":                      func(s *attest.Statement) { clause(&s.Predicate, "files").Verdict = "ok" },
		"an unknown outcome":                      func(s *attest.Statement) { s.Predicate.Outcome = "great" },
		"another type":                            func(s *attest.Statement) { s.Type = "https://in-toto.io/Statement/v0.1" },
		"another predicate":                       func(s *attest.Statement) { s.PredicateType = "https://slsa.dev/provenance/v1" },
		"an artifact without a path":              func(s *attest.Statement) { s.Predicate.Artifacts[0].Path = "a.csv"; *s = attest.New(s.Predicate) },
		"an artifact named like the audit's head": func(s *attest.Statement) { s.Predicate.Artifacts[0].Path = "audit:head"; *s = attest.New(s.Predicate) },
	} {
		s := attest.New(run())
		change(&s)
		if err := s.Check(); !errors.Is(err, attest.ErrContradiction) && !errors.Is(err, attest.ErrMalformed) {
			t.Errorf("%s: %v", name, err)
		}
		key, private := newKey(t)
		if _, err := attest.Sign(s, key.ID, private); err == nil {
			t.Errorf("%s: is signed", name)
		}
		// Verify refuses a contradiction that is signed, as with a stolen key.
		payload, err := json.Marshal(s)
		if err != nil {
			t.Fatal(err)
		}
		e, err := json.Marshal(attest.Envelope{
			PayloadType: attest.PayloadType, Payload: base64.StdEncoding.EncodeToString(payload),
			Signatures: []attest.Signature{{KeyID: key.ID, Sig: base64.StdEncoding.EncodeToString(ed25519.Sign(private, attest.PAE(attest.PayloadType, payload)))}},
		})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := attest.Verify(e, []attest.Key{key}); err == nil {
			t.Errorf("%s: verifies", name)
		}
	}
}

func TestEnvelopesAreReadStrictly(t *testing.T) {
	b, key := signed(t, run())
	text := string(b)
	for name, bad := range map[string]string{
		"nothing":                  "",
		"trailing data":            text + "{}",
		"a duplicate name":         strings.Replace(text, `"payloadType"`, `"payloadType": "x", "payloadType"`, 1),
		"a name in another case":   strings.Replace(text, `"payloadType"`, `"PayloadType"`, 1),
		"an unknown name":          strings.Replace(text, `"payloadType"`, `"extra": 1, "payloadType"`, 1),
		"no signatures":            strings.Replace(text, `"signatures"`, `"signatures": [], "x"`, 1),
		"another type":             strings.Replace(text, "application/vnd.in-toto+json", "application/json", 1),
		"base64 with a line break": strings.Replace(text, `"payload": "`, `"payload": "\n`, 1),
		"base64 without padding":   strings.ReplaceAll(text, "=", ""),
		"not UTF-8":                strings.Replace(text, `"keyid": "`, "\"keyid\": \"\xff", 1),
		"deep":                     strings.Repeat("[", 1000),
		"large":                    text + strings.Repeat(" ", attest.MaxSize),
	} {
		if bad == text {
			t.Fatalf("%s: nothing was changed", name)
		}
		if _, err := attest.Verify([]byte(bad), []attest.Key{key}); err == nil {
			t.Errorf("%s is accepted", name)
		}
	}
	// The payload is parsed as strictly, also if the right key signed it: two readers
	// could disagree.
	key2, private := newKey(t)
	payload, err := json.Marshal(attest.New(run()))
	if err != nil {
		t.Fatal(err)
	}
	for name, p := range map[string]string{
		"a duplicate outcome":        strings.Replace(string(payload), `"outcome"`, `"outcome":"failed","outcome"`, 1),
		"an outcome in another case": strings.Replace(string(payload), `"outcome"`, `"Outcome":"failed","outcome"`, 1),
		"an unknown name":            strings.Replace(string(payload), `"outcome"`, `"result":"failed","outcome"`, 1),
	} {
		e, err := json.Marshal(attest.Envelope{
			PayloadType: attest.PayloadType, Payload: base64.StdEncoding.EncodeToString([]byte(p)),
			Signatures: []attest.Signature{{KeyID: key2.ID, Sig: base64.StdEncoding.EncodeToString(ed25519.Sign(private, attest.PAE(attest.PayloadType, []byte(p))))}},
		})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := attest.Verify(e, []attest.Key{key2}); !errors.Is(err, attest.ErrMalformed) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestKeyDocuments(t *testing.T) {
	key, _ := newKey(t)
	key.From, key.Until = key.From.UTC(), key.From.Add(time.Hour).UTC()
	b, err := attest.KeysDocument([]attest.Key{key})
	if err != nil {
		t.Fatal(err)
	}
	got, err := attest.ParseKeys(b)
	if err != nil || len(got) != 1 || got[0].ID != key.ID || !got[0].Public.Equal(key.Public) || !got[0].From.Equal(key.From) || !got[0].Until.Equal(key.Until) {
		t.Errorf("%+v, %v", got, err)
	}
	other, _ := newKey(t)
	if _, err := attest.ParseKeys(bytes.Replace(b, []byte(key.ID), []byte(other.ID), 1)); err == nil {
		t.Error("a key under the ID of another is accepted")
	}
}

func FuzzVerify(f *testing.F) {
	b, key := signed(f, run())
	f.Add(b)
	f.Add([]byte(`{"payloadType":"application/vnd.in-toto+json","payload":"e30=","signatures":[{"keyid":"","sig":""}]}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		v, err := attest.Verify(data, []attest.Key{key})
		if err == nil && v.Statement.Predicate.Run != "run_1" {
			t.Errorf("a forged statement verifies: %s", data)
		}
		_, _, _ = attest.Peek(data)
	})
}

func FuzzParseKeys(f *testing.F) {
	key, _ := newKey(f)
	b, err := attest.KeysDocument([]attest.Key{key})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Add([]byte(`{"version":1,"keys":[]}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		keys, err := attest.ParseKeys(data)
		for _, k := range keys {
			if err != nil || k.ID != attest.KeyID(k.Public) {
				t.Errorf("key %s, %v", k.ID, err)
			}
		}
	})
}

// TestFormerStatementsStayValid: those of the first version have no evidence in words, and
// those of this version have it for each clause.
func TestFormerStatementsStayValid(t *testing.T) {
	key, private := newKey(t)
	for _, tt := range []struct {
		name, predicate, evidence string
		ok                        bool
	}{
		{"former", "https://postern.dev/run/v1", "", true},
		{"former with evidence", "https://postern.dev/run/v1", "what the server did", false},
		{"new", attest.PredicateType, "what the server did", true},
		{"new without evidence", attest.PredicateType, "", false},
		{"new with none", attest.PredicateType, "none", false},
		{"later", "https://postern.dev/run/v3", "what the server did", false},
	} {
		r := run()
		for i := range r.Clauses {
			r.Clauses[i].Evidence = tt.evidence
		}
		s := attest.New(r)
		s.PredicateType = tt.predicate
		b, err := attest.Sign(s, key.ID, private)
		if err == nil {
			_, err = attest.Verify(b, []attest.Key{key})
		}
		if (err == nil) != tt.ok {
			t.Errorf("%s: %v", tt.name, err)
		}
	}
}
