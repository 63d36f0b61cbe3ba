package command_test

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"postern/internal/command"
	"postern/internal/policy"
	"postern/internal/sandbox"
	"postern/internal/store"
	"postern/internal/storetest"
)

// shellOf returns the start of a shell with a text.
func shellOf(pid int32, text string) sandbox.Exec {
	return run(pid, "/bin/bash", "-l", "-c", text)
}

// order records that a client runs a text in a shell.
func (f *fixture) order(a *command.Admission, text string) *command.Ticket {
	f.t.Helper()
	o := &command.Order{Via: command.ViaSDK, Op: command.OpRun, Size: -1}
	o.Command([]string{"/bin/bash", "-l", "-c", text})
	ticket, err := a.Ordered(f.t.Context(), boxID, o)
	if err != nil {
		f.t.Fatal(err)
	}
	return ticket
}

// row creates the sandbox's row.
func (f *fixture) row() {
	f.t.Helper()
	err := f.db.Update(f.t.Context(), func(tx *store.Tx) error {
		_, err := tx.ExecContext(f.t.Context(), `insert into sandbox (id, project_id, template, state, reason, metadata, inbox_id, egress, cpus, memory_mb, disk_mb, started_at, ends_at, ended_at)
			values ($1, $2, 'base', 'running', '', '{}', '', '{}', 1000, 512, 512, 1, 0, 0)`, boxID, f.owner.Project)
		return err
	})
	if err != nil {
		f.t.Fatal(err)
	}
}

// TestOrdersAreJoinedWithTheirShells: the kernel has seen a prepared shell start with blanks,
// or not at all, before or after the answer with its process came by.
func TestOrdersAreJoinedWithTheirShells(t *testing.T) {
	blanks := strings.Repeat(" ", 1023)
	prepare := func(f *fixture, a *command.Admission, pid int32) {
		launcher := run(pid, sandbox.LauncherPath, "-l", "-c", blanks)
		launcher.UID, launcher.Fixed = 0, false
		a.Exec(t.Context(), f.box(), launcher)
		a.Exec(t.Context(), f.box(), shellOf(pid, blanks))
	}
	exits := func(f *fixture, a *command.Admission, pid int32, code int) {
		a.Exited(f.box(), sandbox.Exit{PID: pid, Code: code, Time: time.Now()})
	}
	for _, tt := range []struct {
		name string
		play func(f *fixture, a *command.Admission)
		want []string // the commands of the record, with what became of them
	}{
		{"prepared", func(f *fixture, a *command.Admission) {
			prepare(f, a, 5)
			prepare(f, a, 6) // waits for the next command
			f.order(a, "echo one").Began(5)
			exits(f, a, 5, 3)
		}, []string{"echo one: exit 3, prepared"}},
		{"prepared while the sandbox got its owner", func(f *fixture, a *command.Admission) {
			for _, pid := range []int32{4, 5} { // of which the second waits
				half := shellOf(pid, blanks)
				a.Exec(t.Context(), f.box(), half)
			}
			prepare(f, a, 6)
			f.order(a, "echo one").Began(4)
			exits(f, a, 4, 0)
			other := shellOf(20, blanks) // not the guest's child
			other.Parent = 19
			a.Exec(t.Context(), f.box(), other)
			exits(f, a, 20, 0)
		}, []string{blanks + ": exit 0", "echo one: exit 0, prepared"}},
		{"prepared in the snapshot", func(f *fixture, a *command.Admission) {
			f.order(a, "echo one").Began(5)
			exits(f, a, 5, 0)
		}, []string{"echo one: exit 0, prepared"}},
		{"ended before the answer came by", func(f *fixture, a *command.Admission) {
			prepare(f, a, 5)
			one, two := f.order(a, "echo one"), f.order(a, "echo two")
			exits(f, a, 5, 0)
			exits(f, a, 9, 1)
			one.Began(5)
			two.Began(9)
		}, []string{"echo one: exit 0, prepared", "echo two: exit 1, prepared"}},
		{"became another program before the answer came by", func(f *fixture, a *command.Admission) {
			prepare(f, a, 5)
			one, two := f.order(a, "exec sleep 1"), f.order(a, "exec sleep 2")
			a.Exec(t.Context(), f.box(), run(5, "sleep", "1"))
			a.Exec(t.Context(), f.box(), run(9, "sleep", "2"))
			one.Began(5)
			two.Began(9)
			exits(f, a, 5, 0)
			exits(f, a, 9, 0)
		}, []string{"exec sleep 1: became, prepared", "exec sleep 2: became, prepared", "sleep 1: exit 0", "sleep 2: exit 0"}},
		{"not prepared", func(f *fixture, a *command.Admission) {
			one := f.order(a, "echo one")
			a.Exec(t.Context(), f.box(), shellOf(5, "echo one"))
			one.Began(5)
			exits(f, a, 5, 0)
		}, []string{"echo one: exit 0"}},
		{"killed while its kernel asked", func(f *fixture, a *command.Admission) {
			a.Exec(t.Context(), f.box(), shellOf(5, "exec sleep 1"))
			a.Exited(f.box(), sandbox.Exit{PID: 5, Signal: 9, Time: time.Now()})
			a.Exec(t.Context(), f.box(), run(5, "sleep", "1"))
		}, []string{"exec sleep 1: signal 9", "sleep 1: signal 9"}},
		{"an order that starts nothing", func(f *fixture, a *command.Admission) { f.order(a, "echo one") }, nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := setup(t, storetest.SQLite(t))
			f.row()
			a := f.start(command.Config{})
			tt.play(f, a)
			r, err := a.Record(t.Context(), boxID)
			if err != nil || !r.Complete {
				t.Fatalf("complete %v, %v", r.Complete, err)
			}
			var got []string
			for _, c := range r.Commands {
				text := c.Args[len(c.Args)-1]
				if c.Args[0] == "sleep" {
					text = strings.Join(c.Args, " ")
				}
				switch {
				case c.Became:
					text += ": became"
				case c.Exited && c.Signal != 0:
					text += ": signal 9"
				case c.Exited:
					text += ": exit " + string(rune('0'+c.Code))
				default:
					text += ": runs"
				}
				if c.Prepared {
					text += ", prepared"
				}
				got = append(got, text)
			}
			slices.Sort(got)
			if !slices.Equal(got, tt.want) {
				t.Errorf("got %q, want %q", got, tt.want)
			}
			if r.Ordered != uint64(len(r.Orders)) {
				t.Errorf("%d orders, of %d", len(r.Orders), r.Ordered)
			}
		})
	}
}

// TestRecordOfAnyEventsIsRead: events come in any order, of a few processes, whose numbers are
// used again, and with the texts of prepared shells. A record that cannot be read ends the
// server, which anybody inside could have it do.
func TestRecordOfAnyEventsIsRead(t *testing.T) {
	f := setup(t, storetest.SQLite(t))
	f.row()
	f.setPolicy("version: 1\nrules:\n  - {id: no, kind: process.exec, when: \"detail.program == '/bin/no' || detail.command.contains('refused')\", then: deny, reason: no}\n")
	blanks := strings.Repeat(" ", 1023)
	r := rand.New(rand.NewPCG(1, 2))
	for round := range 60 {
		a := f.start(command.Config{Dir: t.TempDir(), Hold: time.Millisecond})
		var tickets []*command.Ticket
		for range 80 {
			pid := int32(1 + r.IntN(20))
			e := []sandbox.Exec{shellOf(pid, blanks), shellOf(pid, "refused"), shellOf(pid, "echo"), run(pid, sandbox.LauncherPath, "-l", "-c", blanks)}[r.IntN(4)]
			if r.IntN(5) == 0 {
				e.Path = "/bin/no"
			}
			e.UID, e.Parent, e.Fixed = uint32(r.IntN(2)), int32(r.IntN(3)), r.IntN(4) > 0
			switch r.IntN(7) {
			case 6:
				stub := run(pid, sandbox.LauncherPath, "-l", "-c", blanks)
				stub.UID, stub.Parent = 0, e.Parent
				a.Exec(t.Context(), f.box(), stub)
				a.Exec(t.Context(), f.box(), shellOf(pid, blanks))
			case 0, 1:
				a.Exec(t.Context(), f.box(), e)
			case 2:
				a.Exited(f.box(), sandbox.Exit{PID: pid, Signal: 9 * r.IntN(2), Time: time.Now()})
			case 3:
				tickets = append(tickets, f.order(a, []string{"echo", blanks, "refused"}[r.IntN(3)]))
			case 4:
				if len(tickets) > 0 {
					tickets[r.IntN(len(tickets))].Began(pid)
				}
			case 5:
				if err := a.Input(t.Context(), boxID, "pid 1", []byte("x")); err != nil {
					t.Fatal(err)
				}
			}
		}
		if _, err := a.Record(t.Context(), boxID); err != nil {
			t.Errorf("round %d: %v", round, err)
		}
	}
}

// TestInputHasADigestWhereThePolicySaysSo: what was typed is counted, and its digest is made
// once, of all of it.
func TestInputHasADigestWhereThePolicySaysSo(t *testing.T) {
	f := setup(t, storetest.SQLite(t))
	f.row()
	typed := "secret password\n"
	for _, asked := range []bool{false, true} {
		if asked {
			f.setPolicy("version: 1\nrecord: [" + policy.RecordInput + "]\nrules: []\n")
		}
		a := f.start(command.Config{Dir: t.TempDir()})
		for i := range typed {
			if err := a.Input(t.Context(), boxID, "pid 7", []byte(typed[i:i+1])); err != nil {
				t.Fatal(err)
			}
		}
		r, err := a.Record(t.Context(), boxID)
		if err != nil || len(r.Orders) != 1 || r.Orders[0].Done || r.Orders[0].SHA256 != "" {
			t.Fatalf("while it runs: %+v, %v", r.Orders, err)
		}
		a.Exited(f.box(), sandbox.Exit{PID: 7, Time: time.Now()})
		if r, err = a.Record(t.Context(), boxID); err != nil || len(r.Orders) != 1 {
			t.Fatalf("%+v, %v", r.Orders, err)
		}
		sum := sha256.Sum256([]byte(typed))
		want := ""
		if asked {
			want = hex.EncodeToString(sum[:])
		}
		if o := r.Orders[0]; !o.Done || o.Size != int64(len(typed)) || o.SHA256 != want || r.Lines > 8 {
			t.Errorf("asked %v: %+v in %d lines", asked, o, r.Lines)
		}
	}
}

// TestOrdersUnderAContractMustBeRecorded: what cannot be recorded is not done.
func TestOrdersUnderAContractMustBeRecorded(t *testing.T) {
	f := setup(t, storetest.SQLite(t))
	f.row()
	for _, bound := range []bool{false, true} {
		a := f.start(command.Config{Dir: t.TempDir()})
		if bound {
			if err := a.Bind(boxID, (&side{}).binding(parse(t, "version: 1\nname: n\nlimits: {time: 1m}\n"))); err != nil {
				t.Fatal(err)
			}
		}
		f.order(a, "echo first")
		a.Close() // as if its disk were full: no line can be written any more
		o := &command.Order{Via: command.ViaSDK, Op: command.OpRead, Path: "/etc/passwd", Size: -1}
		if _, err := a.Ordered(t.Context(), boxID, o); bound != errors.Is(err, command.ErrUnrecorded) {
			t.Errorf("bound %v: %v", bound, err)
		}
	}
}

// TestFullDiskIsOnRecord: what could not be written while the disk was full is missing, and the
// record says so, also after a restart.
func TestFullDiskIsOnRecord(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "disk")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("disk", dir, "tmpfs", 0, "size=64k"); err != nil {
		t.Fatalf("mount a small disk: %v", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	f := setup(t, storetest.SQLite(t))
	f.row()
	a := f.start(command.Config{Dir: filepath.Join(dir, "commands")})
	f.order(a, "echo before")
	filler := filepath.Join(dir, "filler")
	if err := os.WriteFile(filler, make([]byte, 1<<20), 0o600); !errors.Is(err, unix.ENOSPC) {
		t.Fatalf("fill the disk: %v", err)
	}
	for range 200 { // the last page of the record has some room
		f.order(a, "echo while it is full")
	}
	if err := os.Remove(filler); err != nil {
		t.Fatal(err)
	}
	f.order(a, "echo after")
	for _, a := range []*command.Admission{a, f.start(command.Config{Dir: filepath.Join(dir, "commands")})} {
		r, err := a.Record(t.Context(), boxID)
		if err != nil || r.Complete || r.Missed == 0 {
			t.Errorf("complete %v, %d lines missed, %v", r.Complete, r.Missed, err)
		}
		if n := len(r.Orders); n == 0 || r.Orders[n-1].Args[3] != "echo after" {
			t.Errorf("the order after it is not recorded: %+v", r.Orders)
		}
	}
}
