package sandbox

import (
	"context"
	"errors"
	"fmt"
)

// ErrAbsent means that this server runs no sandboxes.
var ErrAbsent = errors.New("this server runs no sandboxes (--sandboxes=off)")

// Absent is the [Runtime] of a server without sandboxes. It needs no rights on the
// machine, touches nothing and knows no sandbox.
type Absent struct{}

var _ Runtime = Absent{}

// Start implements [Runtime].
func (Absent) Start(context.Context, Spec) error { return ErrAbsent }

// Stop implements [Runtime].
func (Absent) Stop(context.Context, string) error { return nil }

// Save implements [Runtime].
func (Absent) Save(_ context.Context, id, _ string, _ SaveOptions) error { return unknown(id) }

// Usage implements [Runtime].
func (Absent) Usage(_ context.Context, id string) (Usage, error) { return Usage{}, unknown(id) }

// Wait implements [Runtime].
func (Absent) Wait(_ context.Context, id string) (string, error) { return "", unknown(id) }

// List implements [Runtime].
func (Absent) List(context.Context) ([]string, error) { return nil, nil }

func unknown(id string) error { return fmt.Errorf("sandbox %s: %w: %w", id, ErrAbsent, ErrNotFound) }
