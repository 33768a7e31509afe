// An extra kernel: scales a tensor.
void main(tensor x, tensor y, float factor) {}
