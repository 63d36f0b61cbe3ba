package egress

import (
	"fmt"
	"net/http"
	"runtime"
	"testing"
	"time"

	"postern/internal/auth"
	"postern/internal/policy"
)

// TestIdleLinksAreSmall measures what an idle sandbox costs the wall.
func TestIdleLinksAreSmall(t *testing.T) {
	w := newWorld(t, func(c *Config) {
		open(c)
		c.Inner = func(auth.Principal) http.Handler { return http.NotFoundHandler() }
	})
	measure := func() (bytes uint64, goroutines int) {
		var m runtime.MemStats
		for range 3 {
			runtime.GC()
			time.Sleep(20 * time.Millisecond)
		}
		runtime.ReadMemStats(&m)
		return m.HeapAlloc + m.StackInuse, runtime.NumGoroutine()
	}
	before, g := measure()
	const n = 200
	for i := range n {
		w.bare(fmt.Sprint("i", i), "", policy.Egress{Internet: true})
	}
	after, h := measure()
	per, each := (int64(after)-int64(before))/n, (h-g)/n
	t.Logf("%d KiB and %d goroutines each", per>>10, each)
	// Each stack has one goroutine for each processor, waiting.
	p := runtime.GOMAXPROCS(0)
	if per > int64(64+16*p)<<10 || each > 4+p {
		t.Errorf("an idle link takes %d bytes and %d goroutines", per, each)
	}
}
