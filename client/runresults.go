package client

import (
	"context"
	"fmt"
	"io"
	"strconv"
)

// maxStatement is the largest statement of a run in bytes.
const maxStatement = 8 << 20

// Artifacts returns the artifacts of a run: the files that its contract lists.
func (s *RunService) Artifacts(ctx context.Context, id string) (RunArtifactList, error) {
	return get[RunArtifactList](ctx, s.c, nil, "v1", "runs", id, "artifacts")
}

// Download returns the content of a released artifact; n is its number, from 1. The caller
// closes it.
func (s *RunService) Download(ctx context.Context, id string, n int) (io.ReadCloser, error) {
	return s.c.download(ctx, "v1", "runs", id, "artifacts", strconv.Itoa(n))
}

// Report returns the report of a run that has ended.
func (s *RunService) Report(ctx context.Context, id string) (RunReport, error) {
	return get[RunReport](ctx, s.c, nil, "v1", "runs", id, "report")
}

// Statement returns the signed statement of a run whose sandbox was removed: an in-toto
// Statement in a DSSE envelope, unchanged.
func (s *RunService) Statement(ctx context.Context, id string) ([]byte, error) {
	body, err := s.c.download(ctx, "v1", "runs", id, "statement")
	if err != nil {
		return nil, err
	}
	defer body.Close()
	b, err := io.ReadAll(io.LimitReader(body, maxStatement+1))
	if err == nil && len(b) > maxStatement {
		err = fmt.Errorf("read statement: more than %d bytes", maxStatement)
	}
	return b, err
}
