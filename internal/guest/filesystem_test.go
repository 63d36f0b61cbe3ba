package guest

import (
	"os"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	"postern/internal/guest/filesystempb"
)

func TestFilesystem(t *testing.T) {
	g := newRig(t)
	ctx := t.Context()
	made, err := g.file.MakeDir(ctx, connect.NewRequest(&filesystempb.MakeDirRequest{Path: "a/b"}))
	if err != nil || made.Msg.GetEntry().GetPath() != g.home+"/a/b" || made.Msg.GetEntry().GetOwner() != testUser ||
		made.Msg.GetEntry().GetType() != filesystempb.FileType_FILE_TYPE_DIRECTORY || made.Msg.GetEntry().GetPermissions() != "drwxr-xr-x" {
		t.Fatalf("make: got %v, %v", made, err)
	}
	if _, err = g.file.MakeDir(ctx, connect.NewRequest(&filesystempb.MakeDirRequest{Path: "a/b"})); connect.CodeOf(err) != connect.CodeAlreadyExists {
		t.Errorf("make again: got %v, want already exists", err)
	}
	if err := os.WriteFile(g.home+"/a/f", []byte("12345"), 0o640); err != nil {
		t.Fatal(err)
	}
	_ = os.Symlink("b", g.home+"/a/to-b")
	_ = os.Symlink("nowhere", g.home+"/a/to-nothing")
	res, err := g.file.ListDir(ctx, connect.NewRequest(&filesystempb.ListDirRequest{Path: "a"}))
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, e := range res.Msg.GetEntries() {
		got = append(got, e.GetName()+" "+strings.TrimPrefix(e.GetType().String(), "FILE_TYPE_")+" "+strings.TrimPrefix(e.GetSymlinkTarget(), g.home))
	}
	if g, w := strings.Join(got, ","), "b DIRECTORY ,f FILE ,to-b DIRECTORY /a/b,to-nothing SYMLINK nowhere"; g != w {
		t.Errorf("list: got %s, want %s", g, w)
	}
	if e := res.Msg.GetEntries()[1]; e.GetSize() != 5 || e.GetMode() != 0o640 || e.GetPermissions() != "-rw-r-----" || e.GetOwner() != "root" || time.Since(e.GetModifiedTime().AsTime()) > time.Minute {
		t.Errorf("entry: got %v", e)
	}
	deep, err := g.file.ListDir(ctx, connect.NewRequest(&filesystempb.ListDirRequest{Path: ".", Depth: 2}))
	if err != nil || len(deep.Msg.GetEntries()) != 5 {
		t.Errorf("list to depth 2: got %v, %v, want 5 entries", deep, err)
	}
	moved, err := g.file.Move(ctx, connect.NewRequest(&filesystempb.MoveRequest{Source: "a/f", Destination: "c/d/g"}))
	if err != nil || moved.Msg.GetEntry().GetPath() != g.home+"/c/d/g" {
		t.Errorf("move: got %v, %v", moved, err)
	}
	for range 2 { // removing a missing path succeeds
		if _, err := g.file.Remove(ctx, connect.NewRequest(&filesystempb.RemoveRequest{Path: "a"})); err != nil {
			t.Errorf("remove: %v", err)
		}
	}
	if _, err := g.file.Stat(ctx, connect.NewRequest(&filesystempb.StatRequest{Path: "a"})); connect.CodeOf(err) != connect.CodeNotFound {
		t.Errorf("stat: got %v, want not found", err)
	}
}

func TestFilesystemErrors(t *testing.T) {
	g := newRig(t)
	private := privateDir(t)
	_ = os.Symlink(private, g.home+"/link")
	_ = os.WriteFile(g.home+"/file", nil, 0o644)
	ctx := t.Context()
	stat := func(p string) error {
		_, err := g.file.Stat(ctx, connect.NewRequest(&filesystempb.StatRequest{Path: p}))
		return err
	}
	list := func(p string) error {
		_, err := g.file.ListDir(ctx, connect.NewRequest(&filesystempb.ListDirRequest{Path: p}))
		return err
	}
	makeDir := func(p string) error {
		_, err := g.file.MakeDir(ctx, connect.NewRequest(&filesystempb.MakeDirRequest{Path: p}))
		return err
	}
	remove := func(p string) error {
		_, err := g.file.Remove(ctx, connect.NewRequest(&filesystempb.RemoveRequest{Path: p}))
		return err
	}
	moveTo := func(p string) error {
		_, err := g.file.Move(ctx, connect.NewRequest(&filesystempb.MoveRequest{Source: "file", Destination: p}))
		return err
	}
	moveFrom := func(p string) error {
		_, err := g.file.Move(ctx, connect.NewRequest(&filesystempb.MoveRequest{Source: p, Destination: "stolen"}))
		return err
	}
	watch := func(p string) error {
		_, err := g.file.CreateWatcher(ctx, connect.NewRequest(&filesystempb.CreateWatcherRequest{Path: p}))
		return err
	}
	for _, tt := range []struct {
		name string
		f    func(string) error
		path string
		want connect.Code
	}{
		{"stat missing", stat, "no", connect.CodeNotFound},
		{"stat another's home", stat, "~root/x", connect.CodeInvalidArgument},
		{"list missing", list, "no", connect.CodeNotFound},
		{"list a file", list, "file", connect.CodeInvalidArgument},
		{"make over a file", makeDir, "file", connect.CodeInvalidArgument},
		{"make below a file", makeDir, "file/x", connect.CodeInvalidArgument},
		{"move missing", moveFrom, "no", connect.CodeNotFound},
		{"remove the root", remove, "/", connect.CodeInvalidArgument},
		{"watch a file", watch, "file", connect.CodeInvalidArgument},
		{"watch missing", watch, "no", connect.CodeNotFound},
		{"attacker: stat", stat, "link/secret", connect.CodePermissionDenied},
		{"attacker: list", list, "link", connect.CodePermissionDenied},
		{"attacker: list root's home", list, private, connect.CodePermissionDenied},
		{"attacker: make", makeDir, "link/x", connect.CodePermissionDenied},
		{"attacker: make in /etc", makeDir, "/etc/x", connect.CodePermissionDenied},
		{"attacker: remove", remove, "link/secret", connect.CodePermissionDenied},
		{"attacker: remove root's", remove, private, connect.CodePermissionDenied},
		{"attacker: move in", moveTo, "link/x", connect.CodePermissionDenied},
		{"attacker: move out", moveFrom, "link/secret", connect.CodePermissionDenied},
		{"attacker: watch", watch, "link", connect.CodePermissionDenied},
	} {
		if err := tt.f(tt.path); connect.CodeOf(err) != tt.want {
			t.Errorf("%s: got %v, want %v", tt.name, err, tt.want)
		}
	}
	if b, err := os.ReadFile(private + "/secret"); err != nil || string(b) != "root's" {
		t.Errorf("root's file: got %q, %v", b, err)
	}
}

// TestWatchersSeeTheOwnerOfAWrite: as in E2B, whose guest sets the owner of each file
// that it writes, also of one that there is already.
func TestWatchersSeeTheOwnerOfAWrite(t *testing.T) {
	g := newRig(t)
	st, err := g.file.WatchDir(t.Context(), connect.NewRequest(&filesystempb.WatchDirRequest{Path: "."}))
	if err != nil {
		t.Fatal(err)
	}
	defer st.Close()
	if !st.Receive() || st.Msg().GetStart() == nil {
		t.Fatalf("first event: got %v, %v, want start", st.Msg(), st.Err())
	}
	for _, want := range [][]string{{"CREATE", "CHMOD", "WRITE"}, {"CHMOD", "WRITE"}} {
		if code, body, _ := g.do("POST", "/files?path=a.txt", strings.NewReader("text"), "Content-Type", "application/octet-stream"); code != 200 {
			t.Fatalf("write: %d %s", code, body)
		}
		for _, w := range want {
			for got := ""; got != w; {
				if !st.Receive() {
					t.Fatalf("no %s: %v", w, st.Err())
				}
				got = strings.TrimPrefix(st.Msg().GetFilesystem().GetType().String(), "EVENT_TYPE_")
			}
		}
	}
	if code, body, _ := g.do("GET", "/files?path=missing.txt", nil); code != 404 || !strings.Contains(string(body), "path '"+g.home+"/missing.txt' does not exist") {
		t.Errorf("missing file: %d %s", code, body)
	}
}

func TestWatch(t *testing.T) {
	g := newRig(t)
	st, err := g.file.WatchDir(t.Context(), connect.NewRequest(&filesystempb.WatchDirRequest{Path: ".", Recursive: true, IncludeEntry: true}))
	if err != nil {
		t.Fatal(err)
	}
	defer st.Close()
	if !st.Receive() || st.Msg().GetStart() == nil {
		t.Fatalf("first event: got %v, %v, want start", st.Msg(), st.Err())
	}
	poll, err := g.file.CreateWatcher(t.Context(), connect.NewRequest(&filesystempb.CreateWatcherRequest{Path: "."}))
	if err != nil {
		t.Fatal(err)
	}
	g.sh("mkdir d")
	want := []string{"d CREATE", "d/f CREATE", "d/f WRITE", "d/f REMOVE"}
	for _, w := range want {
		if w == "d/f CREATE" { // who has heard of d may count on what is in it
			g.sh("echo x > d/f; rm d/f")
		}
		for {
			if !st.Receive() {
				t.Fatalf("no %s: %v", w, st.Err())
			}
			e := st.Msg().GetFilesystem()
			if e.GetName()+" "+strings.TrimPrefix(e.GetType().String(), "EVENT_TYPE_") == w {
				if w == "d CREATE" && e.GetEntry().GetOwner() != testUser {
					t.Errorf("entry: got %v", e.GetEntry())
				}
				break
			}
		}
	}
	// A tree that is made faster than it can be watched.
	g.sh("mkdir -p x/y/z; echo > x/y/z/f;")
	for left := map[string]bool{"x": true, "x/y": true, "x/y/z": true, "x/y/z/f": true}; len(left) > 0; {
		if !st.Receive() {
			t.Fatalf("no %v: %v", left, st.Err())
		}
		if e := st.Msg().GetFilesystem(); e.GetType() == filesystempb.EventType_EVENT_TYPE_CREATE {
			if left[e.GetName()] && e.GetEntry().GetPath() != g.home+"/"+e.GetName() {
				t.Errorf("entry of %s: got %v", e.GetName(), e.GetEntry())
			}
			delete(left, e.GetName())
		}
	}
	id := poll.Msg.GetWatcherId()
	var got *connect.Response[filesystempb.GetWatcherEventsResponse]
	for end := time.Now().Add(time.Minute); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		got, err = g.file.GetWatcherEvents(t.Context(), connect.NewRequest(&filesystempb.GetWatcherEventsRequest{WatcherId: id}))
		if err != nil || len(got.Msg.GetEvents()) > 0 {
			break
		}
	}
	if err != nil || len(got.Msg.GetEvents()) == 0 || got.Msg.GetEvents()[0].GetName() != "d" {
		t.Errorf("poll: got %v, %v", got, err)
	}
	if _, err := g.file.RemoveWatcher(t.Context(), connect.NewRequest(&filesystempb.RemoveWatcherRequest{WatcherId: id})); err != nil {
		t.Error(err)
	}
	if _, err := g.file.GetWatcherEvents(t.Context(), connect.NewRequest(&filesystempb.GetWatcherEventsRequest{WatcherId: id})); connect.CodeOf(err) != connect.CodeNotFound {
		t.Errorf("removed: got %v, want not found", err)
	}
}
