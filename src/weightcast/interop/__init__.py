"""Other systems' folders of weights, brought into a channel and written from one."""
