package sandboxtest

import (
	"os"
	"testing"

	"postern/internal/sandbox"
)

func TestFake(t *testing.T) {
	f := &Fake{}
	Run(t, Subject{
		Open: func(*testing.T) sandbox.Runtime { return f },
		Spec: func(t *testing.T, id string) sandbox.Spec {
			link, err := os.Open(os.DevNull)
			if err != nil {
				t.Fatal(err)
			}
			return sandbox.Spec{ID: id, Rootfs: t.TempDir(), Link: link}
		},
		Inside: func(_ *testing.T, id string) Inside { return f.Inside(id) },
	})
}

func TestFakeDies(t *testing.T) {
	f := &Fake{}
	if err := f.Start(t.Context(), sandbox.Spec{ID: "a", Rootfs: t.TempDir()}); err != nil {
		t.Fatal(err)
	}
	f.Die("a", "out of memory")
	reason, err := f.Wait(t.Context(), "a")
	if err != nil || reason != "out of memory" {
		t.Errorf("wait: got %q, %v, want %q", reason, err, "out of memory")
	}
}
