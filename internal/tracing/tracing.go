// Package tracing measures the steps of an operation, as OpenTelemetry spans.
//
// An operation begins where a request arrives, see [Recorder.Handler]. Everything
// below finds its span in the context: [Begin] measures a step in this process, and
// [Add] adds one that another process has measured. Both do nothing, and cost next
// to nothing, in a context without a span.
//
// The names and attributes of spans are written by this program. No text of a caller
// or a sandbox may become one: spans go to the operator's collector.
package tracing

import (
	"cmp"
	"context"
	"net/http"
	"slices"
	"sync"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
)

const (
	scope = "postern" // instrumentation scope of all spans

	maxOperations = 64  // kept in memory
	maxSteps      = 200 // kept of one operation; further ones are dropped
)

// The attributes of the first span of an operation.
const (
	projectKey = attribute.Key("postern.project")
	sandboxKey = attribute.Key("postern.sandbox")
)

// An Operation is a request and its steps.
type Operation struct {
	Project string // ID; empty if none was set
	Sandbox string // ID
	Steps   []Step // the request itself first, then by start
}

// A Step is a part of an operation.
type Step struct {
	Name   string
	Depth  int // 0 for the request itself
	Start  time.Time
	End    time.Time
	Failed bool
}

// A Recorder makes spans. It keeps the newest operations in memory and sends all
// spans to an exporter. The zero Recorder is invalid; a nil *Recorder records
// nothing. It is safe for concurrent use.
type Recorder struct {
	provider *sdktrace.TracerProvider

	mu     sync.Mutex
	recent []Operation // that are about a sandbox; oldest first
}

// An operation is one under way. It is found by the context, not by the trace's ID,
// which a caller may choose: with another caller's ID it could otherwise add to, or
// read, the other's.
type operation struct {
	mu      sync.Mutex
	project string
	sandbox string
	steps   []Step // that have ended
}

type operationKey struct{}

func operationOf(ctx context.Context) *operation {
	op, _ := ctx.Value(operationKey{}).(*operation)
	return op
}

// New returns a recorder. Spans are also sent to exporter, unless it is nil, as those
// of the service "postern" in this version. Shutdown sends the last ones.
func New(version string, exporter sdktrace.SpanExporter) *Recorder {
	r := &Recorder{}
	options := []sdktrace.TracerProviderOption{
		sdktrace.WithResource(resource.NewSchemaless(attribute.String("service.name", "postern"), attribute.String("service.version", version))),
		// A caller says by its header whether it wants a trace.
		sdktrace.WithSampler(sdktrace.ParentBased(sdktrace.AlwaysSample())),
	}
	if exporter != nil {
		options = append(options, sdktrace.WithBatcher(exporter))
	}
	r.provider = sdktrace.NewTracerProvider(options...)
	return r
}

// Close sends the spans that an exporter has not sent yet.
func (r *Recorder) Close(ctx context.Context) error {
	if r == nil {
		return nil
	}
	return r.provider.Shutdown(ctx)
}

// Handler measures the requests for which name returns a name; an empty one means
// that the request is not measured. A request with the header traceparent becomes
// part of that trace (W3C Trace Context).
func (r *Recorder) Handler(next http.Handler, name func(*http.Request) string) http.Handler {
	if r == nil {
		return next
	}
	tracer := r.provider.Tracer(scope)
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		n := name(req)
		if n == "" {
			next.ServeHTTP(w, req)
			return
		}
		ctx := propagation.TraceContext{}.Extract(req.Context(), propagation.HeaderCarrier(req.Header))
		op := &operation{}
		start := time.Now()
		ctx, span := tracer.Start(context.WithValue(ctx, operationKey{}, op), n, trace.WithSpanKind(trace.SpanKindServer))
		defer func() {
			span.End()
			op.add(Step{Name: n, Start: start, End: time.Now()})
			r.keep(op)
		}()
		next.ServeHTTP(w, req.WithContext(ctx))
	})
}

// Of returns ctx with the operation of from, for work that has a context of its own.
func Of(ctx, from context.Context) context.Context {
	ctx = context.WithValue(ctx, operationKey{}, operationOf(from))
	ctx = context.WithValue(ctx, depthKey{}, depthOf(from))
	return trace.ContextWithSpan(ctx, trace.SpanFromContext(from))
}

// depthKey is the context key of the depth of the step under way.
type depthKey struct{}

func depthOf(ctx context.Context) int {
	n, _ := ctx.Value(depthKey{}).(int)
	return n
}

// Begin begins a step of the operation of ctx. The returned context is for the steps
// inside it. Call end once; a step that failed is marked, without the error's text.
func Begin(ctx context.Context, name string) (_ context.Context, end func(error)) {
	parent := trace.SpanFromContext(ctx)
	op := operationOf(ctx)
	if op == nil {
		return ctx, func(error) {}
	}
	start := time.Now()
	ctx, span := parent.TracerProvider().Tracer(scope).Start(ctx, name)
	ctx = context.WithValue(ctx, depthKey{}, depthOf(ctx)+1)
	depth := depthOf(ctx)
	return ctx, func(err error) {
		if err != nil {
			span.SetStatus(codes.Error, "")
		}
		span.End()
		op.add(Step{Name: name, Depth: depth, Start: start, End: time.Now(), Failed: err != nil})
	}
}

// Add adds a step that another process has measured.
func Add(ctx context.Context, name string, start, end time.Time) {
	parent := trace.SpanFromContext(ctx)
	op := operationOf(ctx)
	if op == nil || end.Before(start) {
		return
	}
	_, span := parent.TracerProvider().Tracer(scope).Start(ctx, name, trace.WithTimestamp(start))
	span.End(trace.WithTimestamp(end))
	op.add(Step{Name: name, Depth: depthOf(ctx) + 1, Start: start, End: end})
}

// About says which sandbox of which project the operation of ctx is about. Only that
// project may read it.
func About(ctx context.Context, project, sandbox string) {
	op := operationOf(ctx)
	if op == nil {
		return
	}
	trace.SpanFromContext(ctx).SetAttributes(projectKey.String(project), sandboxKey.String(sandbox))
	op.mu.Lock()
	defer op.mu.Unlock()
	op.project, op.sandbox = project, sandbox
}

func (op *operation) add(s Step) {
	op.mu.Lock()
	defer op.mu.Unlock()
	if len(op.steps) < maxSteps || s.Depth == 0 {
		op.steps = append(op.steps, s)
	}
}

// keep keeps an operation that has ended.
func (r *Recorder) keep(op *operation) {
	op.mu.Lock()
	o := Operation{Project: op.project, Sandbox: op.sandbox, Steps: slices.Clone(op.steps)}
	op.mu.Unlock()
	if o.Sandbox == "" {
		return
	}
	// A step contains those that began later and are deeper.
	slices.SortStableFunc(o.Steps, func(a, b Step) int {
		return cmp.Or(a.Start.Compare(b.Start), cmp.Compare(a.Depth, b.Depth))
	})
	r.mu.Lock()
	defer r.mu.Unlock()
	r.recent = append(r.recent, o)
	if over := len(r.recent) - maxOperations; over > 0 {
		r.recent = slices.Delete(r.recent, 0, over)
	}
}

// Last returns the newest operation on a sandbox of project. An empty project means
// any. It reports false if none is in memory.
func (r *Recorder) Last(project, sandbox string) (Operation, bool) {
	if r == nil {
		return Operation{}, false
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, o := range slices.Backward(r.recent) {
		if o.Sandbox == sandbox && (project == "" || o.Project == project) {
			return o, true
		}
	}
	return Operation{}, false
}
