package tracing_test

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"slices"
	"sync"
	"testing"
	"time"

	sdktrace "go.opentelemetry.io/otel/sdk/trace"

	"postern/internal/tracing"
)

// exported keeps what an exporter gets.
type exported struct {
	mu    sync.Mutex
	spans []sdktrace.ReadOnlySpan
}

func (e *exported) ExportSpans(_ context.Context, spans []sdktrace.ReadOnlySpan) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.spans = append(e.spans, spans...)
	return nil
}

func (*exported) Shutdown(context.Context) error { return nil }

// request serves one request, whose work is f.
func request(t *testing.T, r *tracing.Recorder, parent string, f func(context.Context)) {
	t.Helper()
	h := r.Handler(http.HandlerFunc(func(_ http.ResponseWriter, req *http.Request) { f(req.Context()) }),
		func(req *http.Request) string { return req.URL.Path[1:] })
	req := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/create", http.NoBody)
	if parent != "" {
		req.Header.Set("Traceparent", parent)
	}
	h.ServeHTTP(httptest.NewRecorder(), req)
}

func TestStepsBecomeSpansAndAnOperation(t *testing.T) {
	to := &exported{}
	r := tracing.New("test", to)
	const traceID = "0af7651916cd43dd8448eb211c80319c"
	request(t, r, "00-"+traceID+"-b7ad6b7169203331-01", func(ctx context.Context) {
		tracing.About(ctx, "prj_a", "i1")
		other := tracing.Of(context.Background(), ctx)
		ctx, end := tracing.Begin(other, "start")
		now := time.Now()
		tracing.Add(ctx, "restore", now, now.Add(time.Millisecond))
		tracing.Add(ctx, "backwards", now, now.Add(-time.Millisecond))
		end(nil)
		_, end = tracing.Begin(other, "record")
		end(errors.New("secret text"))
	})
	if err := r.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	op, ok := r.Last("prj_a", "i1")
	if !ok {
		t.Fatal("the operation is not in memory")
	}
	type step struct {
		name   string
		depth  int
		failed bool
	}
	var got []step
	for _, s := range op.Steps {
		got = append(got, step{s.Name, s.Depth, s.Failed})
	}
	want := []step{{"create", 0, false}, {"start", 1, false}, {"restore", 2, false}, {"record", 1, true}}
	if !slices.Equal(got, want) {
		t.Errorf("steps %v, want %v", got, want)
	}
	if len(to.spans) != len(want) {
		t.Errorf("%d spans were exported, want %d", len(to.spans), len(want))
	}
	for _, s := range to.spans {
		if s.SpanContext().TraceID().String() != traceID {
			t.Errorf("span %s is of trace %s", s.Name(), s.SpanContext().TraceID())
		}
		if s.Status().Description != "" {
			t.Errorf("span %s has the text of an error: %q", s.Name(), s.Status().Description)
		}
	}
}

func TestOperationsAreTheirProjectsAlone(t *testing.T) {
	r := tracing.New("test", nil)
	// The attack: another project's caller names the same trace.
	const parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	request(t, r, parent, func(ctx context.Context) { tracing.About(ctx, "prj_a", "i1") })
	request(t, r, parent, func(ctx context.Context) {
		tracing.About(ctx, "prj_b", "i2")
		_, end := tracing.Begin(ctx, "of b")
		end(nil)
	})
	if op, _ := r.Last("prj_a", "i1"); len(op.Steps) != 1 {
		t.Errorf("the operation of a has the steps %v", op.Steps)
	}
	if _, ok := r.Last("prj_a", "i2"); ok {
		t.Error("a reads an operation of b")
	}
	if op, ok := r.Last("", "i2"); !ok || len(op.Steps) != 2 {
		t.Errorf("the operator reads %v", op)
	}
}

func TestMemoryOfOperationsIsBounded(t *testing.T) {
	r := tracing.New("test", nil)
	for range 100 {
		request(t, r, "", func(ctx context.Context) {
			tracing.About(ctx, "p", "i1")
			for range 1000 {
				_, end := tracing.Begin(ctx, "step")
				end(nil)
			}
		})
	}
	if op, _ := r.Last("p", "i1"); len(op.Steps) != 201 || op.Steps[0].Name != "create" {
		t.Errorf("%d steps are kept, the first is %s", len(op.Steps), op.Steps[0].Name)
	}
	request(t, r, "", func(context.Context) {}) // about no sandbox
	for i := range 64 {
		request(t, r, "", func(ctx context.Context) { tracing.About(ctx, "p", string(rune('a'+i))) })
	}
	if _, ok := r.Last("p", "i1"); ok {
		t.Error("more than 64 operations are kept")
	}
}

func TestNothingIsMeasuredOutsideAnOperation(t *testing.T) {
	ctx, end := tracing.Begin(t.Context(), "step")
	end(nil)
	tracing.Add(ctx, "step", time.Now(), time.Now())
	tracing.About(ctx, "p", "i1")
	var none *tracing.Recorder
	request(t, none, "", func(ctx context.Context) { tracing.About(ctx, "p", "i1") })
	if _, ok := none.Last("p", "i1"); ok {
		t.Error("a nil recorder records")
	}
}
