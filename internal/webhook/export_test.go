package webhook

import "context"

// Route makes the deliveries that wait to be made, and sends none.
func Route(ctx context.Context, h *Hooks) error {
	_, err := h.route(ctx)
	return err
}
