package orders

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"mime/multipart"
	"net/http"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/protobuf/encoding/protojson"

	"postern/internal/auth"
	"postern/internal/command"
	"postern/internal/connection"
	"postern/internal/guest/filesystempb"
	"postern/internal/guest/processpb"
	"postern/internal/oversight"
	"postern/internal/rulebook"
	"postern/internal/sandbox"
	"postern/internal/store"
	"postern/internal/storetest"
)

const boxID = "iaaaaaaaaaaaaaaaaaaaa"

// An inside answers for the guest and the interpreter of a sandbox.
type inside struct {
	got    *http.Request
	body   []byte
	answer []byte
	err    error
}

// RoundTrip implements [http.RoundTripper].
func (i *inside) RoundTrip(r *http.Request) (*http.Response, error) {
	i.got = r
	if r.Body != nil {
		b, err := io.ReadAll(r.Body)
		if err := errors.Join(err, r.Body.Close()); err != nil {
			return nil, err
		}
		i.body = b
	}
	if i.err != nil {
		return nil, i.err
	}
	return &http.Response{StatusCode: http.StatusOK, Header: http.Header{}, Body: io.NopCloser(bytes.NewReader(i.answer)), ContentLength: -1, Request: r}, nil
}

// recorder returns the record of a sandbox, and a transport that writes it.
func recorder(t testing.TB) (*command.Admission, *inside, http.RoundTripper) {
	t.Helper()
	db := storetest.SQLite(t)
	log := slog.New(slog.NewTextHandler(t.Output(), nil))
	err := db.Update(t.Context(), func(tx *store.Tx) error {
		project, _, err := auth.NewProject(t.Context(), tx, "one")
		if err != nil {
			return err
		}
		_, err = tx.ExecContext(t.Context(), `insert into sandbox (id, project_id, template, state, reason, metadata, inbox_id, egress, cpus, memory_mb, disk_mb, started_at, ends_at, ended_at)
			values ($1, $2, 'base', 'running', '', '{}', '', '{}', 1000, 512, 512, 1, 0, 0)`, boxID, project)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	book := rulebook.New(log, db)
	gate := oversight.NewGate(log, db, book)
	a, err := command.New(log, db, gate, connection.New(log, db, book, gate, 0), command.Config{
		Dir: filepath.Join(t.TempDir(), "commands"), Contract: func(context.Context, string) (string, error) { return "", nil },
	})
	if err != nil {
		t.Fatal(err)
	}
	in := &inside{}
	return a, in, Record(in, a, command.ViaSDK)
}

func request(t testing.TB, method, path, kind string, port int, body []byte) *http.Request {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), method, fmt.Sprintf("http://%s:%d%s", boxID, port, path), bytes.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Content-Type", kind)
	r.SetBasicAuth("root", "")
	return r
}

// envelop returns a message as it stands in a stream.
func envelop(b []byte) []byte {
	return append(binary.BigEndian.AppendUint32([]byte{0}, uint32(len(b))), b...)
}

func startOf(t testing.TB, words ...string) []byte {
	t.Helper()
	b, err := protojson.Marshal(&processpb.StartRequest{Process: &processpb.ProcessConfig{Cmd: words[0], Args: words[1:]}})
	if err != nil {
		t.Fatal(err)
	}
	return envelop(b)
}

// TestRequestsPassUnchanged: what is recorded arrives as it was sent, and the answer as it
// was given.
func TestRequestsPassUnchanged(t *testing.T) {
	var form bytes.Buffer
	w := multipart.NewWriter(&form)
	for _, name := range []string{"/home/user/a.txt", "/home/user/b \"c\".txt"} {
		part, err := w.CreateFormFile("file", name)
		if err != nil {
			t.Fatal(err)
		}
		_, _ = part.Write(bytes.Repeat([]byte(name), 10_000))
	}
	w.Close()
	large := append(startOf(t, "/bin/bash", "-l", "-c", "true"), bytes.Repeat([]byte("x"), 2*maxRead)...)
	for _, tt := range []struct {
		name, method, path, kind string
		port                     int
		body                     []byte
		want                     command.Order
	}{
		{"start", "POST", processpb.ProcessStartProcedure, "application/connect+json", sandbox.GuestPort, startOf(t, "/bin/ls", "-l"), command.Order{Op: command.OpRun, User: "root"}},
		{"start that is longer than what is read", "POST", processpb.ProcessStartProcedure, "application/connect+json", sandbox.GuestPort, large, command.Order{Op: command.OpRun, User: "root"}},
		{"start that cannot be read", "POST", processpb.ProcessStartProcedure, "text/plain", sandbox.GuestPort, []byte("?"), command.Order{Op: command.OpRun, User: "root"}},
		{"signal", "POST", processpb.ProcessSendSignalProcedure, "application/json", sandbox.GuestPort, []byte(`{"process":{"pid":7},"signal":"SIGNAL_SIGKILL"}`), command.Order{Op: command.OpSignal, User: "root", PID: 7}},
		{"directory", "POST", filesystempb.FilesystemMakeDirProcedure, "application/json", sandbox.GuestPort, []byte(`{"path":"/x"}`), command.Order{Op: command.OpMakeDir, User: "root", Path: "/x"}},
		{"rename", "POST", filesystempb.FilesystemMoveProcedure, "application/json", sandbox.GuestPort, []byte(`{"source":"/x","destination":"/y"}`), command.Order{Op: command.OpMove, User: "root", Path: "/x", To: "/y"}},
		{"removal", "POST", filesystempb.FilesystemRemoveProcedure, "application/json", sandbox.GuestPort, []byte(`{"path":"/y"}`), command.Order{Op: command.OpRemove, User: "root", Path: "/y"}},
		{"file", "POST", "/files?path=/home/user/x", "application/octet-stream", sandbox.GuestPort, bytes.Repeat([]byte("y"), 3*maxRead), command.Order{Op: command.OpWrite, User: "root", Path: "/home/user/x", Size: 3 * maxRead, Done: true}},
		{"files of a form", "POST", "/files", w.FormDataContentType(), sandbox.GuestPort, form.Bytes(), command.Order{Op: command.OpWrite, User: "root", Path: "/home/user/a.txt\n/home/user/b \"c\".txt", Size: int64(form.Len()), Done: true}},
		{"a body that is no form", "POST", "/files", w.FormDataContentType(), sandbox.GuestPort, bytes.Repeat([]byte("no form\r\n"), 100_000), command.Order{Op: command.OpWrite, User: "root", Size: 900_000, Done: true}},
		{"joined files", "POST", "/files/compose", "application/json", sandbox.GuestPort, []byte(`{"source_paths":["/a","/b"],"destination":"/c","username":"user"}`), command.Order{Op: command.OpCompose, User: "root", Path: "/a\n/b", To: "/c"}},
		{"read", "GET", "/files?path=/etc/hosts&username=user", "", sandbox.GuestPort, nil, command.Order{Op: command.OpRead, User: "root", Path: "/etc/hosts", Size: 6, Done: true}},
		{"cell", "POST", "/execute", "application/json", interpreterPort, []byte(`{"Code":"no","code":"1+1","language":"r"}`), command.Order{Op: command.OpCode, User: "root", Language: "r", Size: 3, Stdout: 6, Done: true}},
		{"cell by another spelling of the path", "POST", "//execute/", "application/json", interpreterPort, []byte(`{"code":"1+1"}`), command.Order{Op: command.OpCode, User: "root", Size: 3, Stdout: 6, Done: true}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			a, in, rt := recorder(t)
			in.answer = []byte("answer")
			resp, err := rt.RoundTrip(request(t, tt.method, tt.path, tt.kind, tt.port, tt.body))
			if err != nil {
				t.Fatal(err)
			}
			b, err := io.ReadAll(resp.Body)
			if err := errors.Join(err, resp.Body.Close()); err != nil || string(b) != "answer" {
				t.Errorf("answer %q, %v", b, err)
			}
			if !bytes.Equal(in.body, tt.body) {
				t.Errorf("%d bytes arrived, want the %d that were sent", len(in.body), len(tt.body))
			}
			r, err := a.Record(t.Context(), boxID)
			if err != nil || len(r.Orders) != 1 || !r.Complete {
				t.Fatalf("record %+v, %v", r, err)
			}
			o := r.Orders[0]
			if o.Via != command.ViaSDK || o.Op != tt.want.Op || o.User != tt.want.User || o.PID != tt.want.PID || o.Path != tt.want.Path || o.To != tt.want.To || o.Language != tt.want.Language ||
				tt.want.Done && (o.Size != tt.want.Size || o.Stdout != tt.want.Stdout || !o.Done) {
				t.Errorf("recorded %+v, want %+v", o, tt.want)
			}
		})
	}
}

// TestWhatOrdersNothingIsNotRecorded: questions, other ports, and a record that nobody keeps.
func TestWhatOrdersNothingIsNotRecorded(t *testing.T) {
	a, in, rt := recorder(t)
	for _, r := range []*http.Request{
		request(t, "POST", "/process.Process/List", "application/json", sandbox.GuestPort, []byte("{}")),
		request(t, "GET", "/health", "", sandbox.GuestPort, nil),
		request(t, "GET", "/execute", "", interpreterPort, nil),
		request(t, "POST", "/execute", "application/json", 8080, []byte("{}")),
	} {
		if _, err := rt.RoundTrip(r); err != nil || in.got.URL.Path != r.URL.Path {
			t.Errorf("%s: %v", r.URL, err)
		}
	}
	if r, err := a.Record(t.Context(), boxID); err == nil && r.Ordered > 0 {
		t.Errorf("recorded %+v", r.Orders)
	}
	if Record(in, nil, command.ViaSDK) != http.RoundTripper(in) {
		t.Error("a transport without a record is another one")
	}
}

// TestWhatFailsIsOnRecord: the sandbox may have done it although no answer came.
func TestWhatFailsIsOnRecord(t *testing.T) {
	a, in, rt := recorder(t)
	in.err = errors.New("gone")
	if _, err := rt.RoundTrip(request(t, "POST", processpb.ProcessStartProcedure, "application/connect+json", sandbox.GuestPort, startOf(t, "/bin/ls"))); !errors.Is(err, in.err) {
		t.Errorf("got %v", err)
	}
	r, err := a.Record(t.Context(), boxID)
	if err != nil || len(r.Orders) != 1 || strings.Join(r.Orders[0].Args, " ") != "/bin/ls" || r.Orders[0].PID != 0 {
		t.Errorf("record %+v, %v", r.Orders, err)
	}
}

// BenchmarkStart is what the record of a command costs.
func BenchmarkStart(b *testing.B) {
	_, in, rt := recorder(b)
	in.answer = encode(b, true, started(7), data(&processpb.ProcessEvent_DataEvent{Output: &processpb.ProcessEvent_DataEvent_Stdout{Stdout: []byte("hello\n")}}), ended())
	body := startOf(b, "/bin/bash", "-l", "-c", "echo hello")
	for name, way := range map[string]http.RoundTripper{"recorded": rt, "plain": in} {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				resp, err := way.RoundTrip(request(b, "POST", processpb.ProcessStartProcedure, "application/connect+json", sandbox.GuestPort, body))
				if err != nil {
					b.Fatal(err)
				}
				_, _ = io.Copy(io.Discard, resp.Body)
				resp.Body.Close()
			}
		})
	}
}
